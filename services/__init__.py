"""The services of Ryzanstein.

gRPC's core writes its own lines to stderr, about ended connections for example. They are switched off here, since its
errors also arrive as exceptions or statuses; setting `GRPC_VERBOSITY` switches them on. gRPC reads the variable when it
is first imported, so it is set before any module of a service is.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
