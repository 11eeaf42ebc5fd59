from rewarm.cli.app import main

main()
