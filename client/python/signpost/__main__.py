from signpost._program import main

main()
