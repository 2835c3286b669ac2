"""Joining the processes of a job, and communication between them."""

from ._address import DEFAULT_PORT, bracketed, is_ipv6, read_address
from ._agree import check_equal, checksum, listed
from ._devices import check_devices, simulate_devices
from ._environment import Job, asks_for_determinism, compiler_variables, compiles_for_tpus_anywhere
from ._errors import failure_of, raise_on_all, run_on_all
from ._gather import gather_numbers, gather_texts
from ._handshake import handshake, meet
from ._heartbeat import HEARTBEAT_FILE, Heartbeat
from ._init import init_distributed, names_other_processes
from ._log import log
from ._numbers import whole_number
from ._tail import Tail
