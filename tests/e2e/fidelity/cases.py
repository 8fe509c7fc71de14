"""Scripts that must come to the same, run as `python -u script.py` and forked from the zygote: what they print on both
streams, and how they end. Each is a file of its own for them."""

# Ends.
ENDS = {
    "ends": "print('done')",
    "exits": "import sys; sys.exit(3)",
    "exits_with_none": "import sys; sys.exit(None)",
    "exits_with_text": "import sys; sys.exit('went wrong')",
    "exits_at_once": "import os; print('never', end=''); os._exit(7)",
    "raises": """
def inner(n):
    return 1 / n

def outer():
    try:
        inner(0)
    except ZeroDivisionError as error:
        raise RuntimeError("outer") from error

outer()
""",
    "raises_a_group": "raise ExceptionGroup('two', [ValueError(1), KeyError('x')])",
    "raises_nothing_known": "class Own(BaseException): pass\nraise Own('mine')",
    "interrupts_itself": """
import atexit, os, signal
atexit.register(print, "atexit")
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
finally:
    print("finally")
""",
    "is_terminated": "import os, signal; print('x', end=''); os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "is_killed": "import os; os.kill(os.getpid(), 9)",
    "has_a_syntax_error": "print('never')\nif True print('never')\n",
    "has_a_bad_encoding": "# -*- coding: latin-1 -*-\nprint(len('\xe9'))\nx = '\xff",
    "imports_what_is_not_there": "import no_such_module_anywhere",
    "imports_a_broken_module": "import broken_module",
    "has_a_hook": """
import sys

def hook(kind, value, traceback):
    print("hook", kind.__name__, value, traceback.tb_lineno, traceback.tb_next, value.__traceback__ is traceback)
    print(sys.last_type is kind, sys.last_value is value, sys.last_traceback is traceback, sys.excepthook is hook)

sys.excepthook = hook
raise ValueError("x")
""",
    "has_a_hook_that_exits": """
import sys
sys.excepthook = lambda *_: sys.exit(9)
raise ValueError("x")
""",
    "cleans_up": """
import atexit, sys, threading, time, weakref

class Thing:
    def __init__(self, name):
        self.name = name
        self.me = self  # only the collector gets it
    def __del__(self):
        print("deleted", self.name)

class Alone(Thing):
    def __init__(self, name):
        self.name = name

alone = Alone("module level")
circle = Thing("in a circle")
weakref.finalize(alone, print, "finalized")
atexit.register(print, "atexit 1")
atexit.register(lambda: print("atexit 2", threading.active_count()))

def late():
    while threading.main_thread().is_alive():
        time.sleep(0.001)
    print("the thread ends after main")

threading.Thread(target=late).start()
unclosed = open("unclosed", "w")
unclosed.write("unclosed, and yet written")
try:
    sys.exit(5)
finally:
    print("finally")
""",
    "raises_while_ending": "import atexit\natexit.register(lambda: 1 / 0)\nprint('x')",
    "loses_its_output": "import os, sys\nprint('seen')\nos.close(1)\nprint('not seen')\n",
    "faults": "import faulthandler, os, sys\nfaulthandler.enable()\nos.abort()",
    "dumps": "import faulthandler\ndef f():\n    faulthandler.dump_traceback(all_threads=False)\nf()",
    "warns": "import warnings\nwarnings.warn('old')\nwarnings.warn('dep', DeprecationWarning)",
    "writes_without_newlines": "import sys\nfor n in range(4):\n    (sys.stdout, sys.stderr)[n % 2].write(str(n))",
    "reads": "import sys\nprint(repr(sys.stdin.readline()), sys.stdin.buffer.read(), input)",
}

# Other processes.
PROCESSES = {
    "runs_programs": """
import os, subprocess, sys
print(subprocess.run(["cat"], input=b"through", capture_output=True).stdout)
subprocess.run("echo plain; echo more >&2; exit 3", shell=True)
code = "import sys, os; print(sys.argv, sys.flags.utf8_mode, os.environ.get('RANK'))"
subprocess.run([sys.executable, "-c", code, "a b"], check=True)
print(os.waitstatus_to_exitcode(os.system("exit 4")))
pid = os.fork()
if pid == 0:
    print("forked")
    os._exit(6)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "multiplies": """
import concurrent.futures, multiprocessing, sys
from dataclasses import dataclass

@dataclass
class Box:
    value: int

def double(box):
    return Box(box.value * 2)

def say(queue, box):
    queue.put((type(box).__module__, box.value, __name__, multiprocessing.parent_process().name))

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=say, args=(queue, Box(3)), name="child")
        process.start()
        print(method, queue.get())
        process.join()
        print(process.exitcode)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        print(list(pool.map(double, [Box(1), Box(2)])))
    with multiprocessing.Pool(2) as pool:
        print(pool.map(double, [Box(4)]))
    import pickle
    print(pickle.loads(pickle.dumps(Box(5))))
""",
    "loads_data": """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor(i * i)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader])
    print(torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item())
    model = torch.nn.Linear(4, 1)
    model(torch.ones(2, 4)).sum().backward()
    print(model.weight.grad.tolist())
""",
    "spawns_with_torch": """
import torch
import torch.multiprocessing as mp

def work(rank, out):
    out[rank] = rank + 1

if __name__ == "__main__":
    shared = torch.zeros(2).share_memory_()
    mp.spawn(work, args=(shared,), nprocs=2)
    print(shared.tolist())
""",
}

# What is imported, and what is set before.
IMPORTS = {
    "needs_no_torch": "import sys\nprint('torch' in sys.modules, 'numpy' in sys.modules)",
    "wants_numpy_only": "import sys, numpy\nprint('torch' in sys.modules, 'numpy' in sys.modules, numpy.ones(2).sum())",
    "wants_a_part_of_torch": """
import sys
from torch.nn import functional
print('torch' in sys.modules, 'torch.nn' in sys.modules, functional.__name__, sys.modules['torch'].nn.functional)
""",
    "sets_threads_first": """
import os
os.environ["OMP_NUM_THREADS"] = "1"
import torch
print(torch.get_num_threads())
""",
    "sets_more_threads": """
import os
os.environ["OMP_NUM_THREADS"] = "64"
import torch
print(torch.get_num_threads(), torch.ones(64, 64, 64).sum().item())
""",
    "lets_threads_free": """
import os
del os.environ["OMP_NUM_THREADS"]
import torch
print(torch.get_num_threads())
""",
    "sets_mkl_threads": """
import os
os.environ["MKL_NUM_THREADS"] = "1"
import torch
print(torch.get_num_threads())
""",
    "sets_threads_between": """
import numpy, os
os.environ["OMP_NUM_THREADS"] = "1"
import torch
print(torch.get_num_threads())
""",
    "asks_whether_torch_is_there": """
import importlib.metadata, importlib.util, sys
print(importlib.util.find_spec("torch").name, importlib.metadata.version("torch"), "torch" in sys.modules)
import importlib.resources, torch
print(importlib.resources.files("torch").is_dir(), importlib.reload(sys.modules["torch.version"]) is torch.version)
""",
    "imports_its_neighbour": "import neighbour\nprint(neighbour.VALUE, neighbour.__name__)",
    "seeds": """
import random, torch, numpy
random.seed(1); torch.manual_seed(1); numpy.random.seed(1)
print(random.random(), torch.rand(1).item(), numpy.random.rand())
""",
}

SCRIPTS = {**ENDS, **PROCESSES, **IMPORTS}
