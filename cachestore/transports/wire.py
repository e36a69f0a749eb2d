"""The TCP plane's frames. Little-endian, fixed headers, every length checked before it is believed.

request   "MRQ1"  count u32  epoch u64  id u64      then count times: pool u32, offset u64, length u64
reply     "MRP1"  status u32  id u64  length u64    then, if status is OK, the ranges' bytes in order
"""

from __future__ import annotations

import struct
from enum import IntEnum

REQUEST_MAGIC, REPLY_MAGIC = b"MRQ1", b"MRP1"
REQUEST = struct.Struct("<4sIQQ")
RANGE = struct.Struct("<IQQ")
REPLY = struct.Struct("<4sIQQ")
RANGES_MAX = 4096  # per request; a longer read is several requests
REQUEST_BYTES_MAX = 1 << 30
BUFFER_BYTES = 4 << 20  # asked of the kernel, which may give less


class Status(IntEnum):
    OK = 0
    STALE_EPOCH = 1
    OUT_OF_RANGE = 2
    MALFORMED = 3
    BUSY = 4
