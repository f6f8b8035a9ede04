from services.finetuner.main import main

main()
