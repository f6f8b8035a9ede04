"""Says how many workers a load needs: replays requests in virtual time on the real scheduler and the real policy."""
