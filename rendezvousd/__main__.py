from rendezvousd.cli import main

main()
