"""Settings of a node: what there is (settings), what each means (words), where a value came from (sources).

    default  <  file (TOML)  <  TIERKV_<NAME>  <  option of `tierkv serve`

Nothing is guessed: a size needs a unit that exists, an unknown name is an error that names the nearest known one. Every
error is a ConfigError that names the field and says what to write.
"""

from tierkv.config.machine import Machine, cgroup_limit
from tierkv.config.settings import Settings, machine_defaults
from tierkv.config.sizes import GiB, KiB, MiB, TiB, format_size, human_size, parse_size
from tierkv.config.sources import Effective, find_file, load, option_name, variable_name

__all__ = [
    "Settings",
    "load",
    "find_file",
    "Effective",
    "Machine",
    "cgroup_limit",
    "machine_defaults",
    "option_name",
    "variable_name",
    "parse_size",
    "format_size",
    "human_size",
    "KiB",
    "MiB",
    "GiB",
    "TiB",
]
