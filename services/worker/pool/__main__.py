from services.worker.pool.main import main

if __name__ == "__main__":
    main()
