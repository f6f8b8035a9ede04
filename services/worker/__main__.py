import os

# Ranks are started by fork and exec, so gRPC's fork handlers would only warn. gRPC reads this on import.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from services.worker.main import main

if __name__ == "__main__":
    main()
