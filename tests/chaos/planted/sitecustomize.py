"""A fault planted in the ranks: they die of a prompt that begins with RYZANSTEIN_TEST_KILLER, as of a bug in a kernel.

Python imports this file at the start of every process whose PYTHONPATH names its folder.
"""

import os
import signal
import sys

killer = [int(token) for token in os.environ.get("RYZANSTEIN_TEST_KILLER", "").split(",") if token]
if killer and "services.worker.rank" in sys.orig_argv:
    from services.worker.rank.slot_table import SlotTable

    admit = SlotTable.admit

    def admit_or_die(self, admission):
        if list(admission.token_ids[: len(killer)]) == killer:
            os.kill(os.getpid(), signal.SIGKILL)
        admit(self, admission)

    SlotTable.admit = admit_or_die
