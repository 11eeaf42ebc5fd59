from rewarm.cli import main

main()
