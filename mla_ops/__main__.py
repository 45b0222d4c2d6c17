"""Stand-in."""

from mla_ops import _C

print(_C.build_info(), _C.cpu_isa())
