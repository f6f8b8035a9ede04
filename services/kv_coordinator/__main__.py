from services.kv_coordinator.main import main

main()
