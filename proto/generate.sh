#!/usr/bin/env bash
# Regenerates rendezvousd/v1 and rendezvousd/etcd from the .proto files here. CI runs it and fails on a difference.
#
# protoc is pinned and old on purpose: code made by grpcio-tools 1.62 is read by protobuf 4.25 to 7.x, while newer ones
# refuse older runtimes, and training images pin protobuf. It gets a virtual environment of its own, so that it does not
# meet the protobuf of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${PROTO_VENV:-build/protoc}
if [ ! -x "$venv/bin/protoc-gen-mypy" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check \
    'grpcio-tools==1.62.3' 'protobuf==4.25.9' 'mypy-protobuf==3.6.0' 'types-protobuf==4.25.0.20240417' 'setuptools<81'
fi
PATH="$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc --proto_path=proto \
  --python_out=. --mypy_out=quiet:. proto/rendezvousd/v1/*.proto proto/rendezvousd/etcd/v1/*.proto
touch rendezvousd/v1/__init__.py rendezvousd/etcd/__init__.py rendezvousd/etcd/v1/__init__.py
