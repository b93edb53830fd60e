from fedup.cli import main

main()
