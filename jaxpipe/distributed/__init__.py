"""Joining the processes of a job, and communication between them."""

from ._address import DEFAULT_PORT as DEFAULT_PORT
from ._address import bracketed as bracketed
from ._address import is_ipv6 as is_ipv6
from ._address import read_address as read_address
from ._agree import check_equal as check_equal
from ._agree import checksum as checksum
from ._agree import listed as listed
from ._devices import check_devices as check_devices
from ._devices import simulate_devices as simulate_devices
from ._environment import Job as Job
from ._environment import asks_for_determinism as asks_for_determinism
from ._environment import compiler_variables as compiler_variables
from ._environment import compiles_for_tpus_anywhere as compiles_for_tpus_anywhere
from ._errors import failure_of as failure_of
from ._errors import raise_on_all as raise_on_all
from ._errors import run_on_all as run_on_all
from ._gather import gather_numbers as gather_numbers
from ._gather import gather_texts as gather_texts
from ._handshake import handshake as handshake
from ._handshake import meet as meet
from ._heartbeat import HEARTBEAT_FILE as HEARTBEAT_FILE
from ._heartbeat import Heartbeat as Heartbeat
from ._init import init_distributed as init_distributed
from ._init import names_other_processes as names_other_processes
from ._log import log as log
from ._numbers import whole_number as whole_number
from ._tail import Tail as Tail

__all__ = [
    "simulate_devices",
    "Job",
    "HEARTBEAT_FILE",
    "DEFAULT_PORT",
    "Heartbeat",
    "Tail",
    "asks_for_determinism",
    "bracketed",
    "check_devices",
    "check_equal",
    "checksum",
    "compiler_variables",
    "compiles_for_tpus_anywhere",
    "failure_of",
    "gather_numbers",
    "gather_texts",
    "handshake",
    "init_distributed",
    "is_ipv6",
    "listed",
    "log",
    "meet",
    "names_other_processes",
    "raise_on_all",
    "read_address",
    "run_on_all",
    "whole_number",
]
