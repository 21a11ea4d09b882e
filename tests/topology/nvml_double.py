"""An NVML that answers with the values of real kinds of machines.

What a machine does not answer raises, as NVML does (not supported, no permission). The structures
have the fields of nvidia-ml-py; GPUs are recorded in tables, nothing is computed here but lookups.
"""

import ctypes
from types import SimpleNamespace

NVSWITCH, GPU = 2, 0


class NotSupportedError(Exception):
    def __str__(self):
        return "Not Supported"


class FabricInfo(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
        ("healthMask", ctypes.c_uint32),
    ]


class Recorded:
    """GPUs of one host.

    Args:
        buses: bus ids as NVML writes them.
        sm, title: of all GPUs.
        links: by GPU the remote ends of its links: (bus id, kind), or None for one that is down.
        ancestors: by pair, NVML's number.
        joined: pairs whose P2P status over NVLink is OK; the others have the status 2 or 5.
        refused: names of functions that raise.
    """

    c_nvmlGpuFabricInfoV_t = FabricInfo  # noqa: N815

    def __init__(
        self, buses, sm, title, links, ancestors, joined, speed, fabric=None, refused=(), mig=()
    ):
        self.buses, self.sm, self.title, self.links = buses, sm, title, links
        self.ancestors, self.joined, self.speed, self.fabric = ancestors, joined, speed, fabric
        self.refused, self.mig = set(refused), set(mig)

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "refused"):
            raise NotSupportedError
        return object.__getattribute__(self, name)

    def nvmlDeviceGetCount(self):
        return len(self.buses)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=self.buses[gpu].encode())

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{self.buses[gpu]}"

    def nvmlDeviceGetName(self, gpu):
        return self.title

    def nvmlDeviceGetCudaComputeCapability(self, gpu):
        return divmod(self.sm, 10)

    def nvmlDeviceGetMigMode(self, gpu):
        return [int(gpu in self.mig), int(gpu in self.mig)]

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= len(self.links[gpu]):
            raise NotSupportedError
        return int(self.links[gpu][link] is not None)

    def nvmlDeviceGetFieldValues(self, gpu, fields):
        return [self._field(gpu, field, link) for field, link in fields]

    def _field(self, gpu, field, link):
        if field == 164 and self.links[gpu]:
            return SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.speed))
        if field == 165 and link < len(self.links[gpu]):
            up = int(self.links[gpu][link] is not None)
            return SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=up))
        return SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return SimpleNamespace(busId=self.links[gpu][link][0].encode())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        return self.links[gpu][link][1]

    def nvmlDeviceGetP2PStatus(self, first, second, index):
        assert index == 2
        return 0 if frozenset((first, second)) in self.joined else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        return self.ancestors(first, second)

    def nvmlDeviceGetGpuFabricInfoV(self, gpu, reference):
        if self.fabric is None:
            raise NotSupportedError
        uuid, clique, state = self.fabric
        info = reference._obj
        info.clusterUuid[:] = uuid
        info.cliqueId, info.state, info.status = clique, state, 0


def pairs(groups):
    return {frozenset((a, b)) for group in groups for a in group for b in group if a != b}


def hgx_h200(**changes):
    """Eight H200 behind four NVSwitches, 18 links each; GPUs of a socket share no host bridge."""
    buses = [f"00000000:{n:02X}:00.0" for n in (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)]
    switches = [f"00000000:{n:02X}:00.0" for n in (5, 6, 7, 8)]
    links = [[(switches[link % 4], NVSWITCH) for link in range(18)] for _ in buses]
    given = {
        "buses": buses,
        "sm": 90,
        "title": "NVIDIA H200",
        "links": links,
        "ancestors": lambda a, b: 40 if a // 4 == b // 4 else 50,
        "joined": pairs([range(8)]),
        "speed": 26562,
    }
    return Recorded(**given | changes)


CUBE = {
    0: {1: 1, 2: 1, 3: 2, 4: 2},
    1: {0: 1, 2: 2, 3: 1, 5: 2},
    2: {0: 1, 1: 2, 3: 2, 6: 1},
    3: {0: 2, 1: 1, 2: 2, 7: 1},
    4: {0: 2, 5: 1, 6: 1, 7: 2},
    5: {1: 2, 4: 1, 6: 2, 7: 1},
    6: {2: 1, 4: 1, 5: 2, 7: 2},
    7: {3: 1, 4: 2, 5: 1, 6: 2},
}


def dgx1(**changes):
    """DGX-1 with V100: the cube mesh; two GPUs behind each PCIe switch."""
    buses = [f"00000000:{n:02X}:00.0" for n in (6, 7, 0xA, 0xB, 0x85, 0x86, 0x89, 0x8A)]
    links = [
        [(buses[peer], GPU) for peer, number in CUBE[gpu].items() for _ in range(number)]
        for gpu in range(8)
    ]

    def ancestors(a, b):
        return 10 if a // 2 == b // 2 else 30 if a // 4 == b // 4 else 50

    given = {
        "buses": buses,
        "sm": 70,
        "title": "Tesla V100-SXM2-16GB",
        "links": links,
        "ancestors": ancestors,
        "joined": {frozenset((a, b)) for a in CUBE for b in CUBE[a]},
        "speed": 25781,
    }
    return Recorded(**given | changes)


def bridged_pcie(**changes):
    """Four A100 PCIe, joined in pairs by bridges of twelve links."""
    buses = [f"00000000:{n:02X}:00.0" for n in (0x17, 0x65, 0xCA, 0xE3)]
    peer = {0: 1, 1: 0, 2: 3, 3: 2}
    given = {
        "buses": buses,
        "sm": 80,
        "title": "NVIDIA A100 80GB PCIe",
        "links": [[(buses[peer[gpu]], GPU)] * 12 for gpu in range(4)],
        "ancestors": lambda a, b: 40 if a // 2 == b // 2 else 50,
        "joined": pairs([(0, 1), (2, 3)]),
        "speed": 25000,
    }
    return Recorded(**given | changes)


def gb200_tray(tray, **changes):
    """A tray of four GB200 in a rack; other trays have other bus ids, and the same fabric."""
    buses = [f"000000{n:02X}:{tray + 1:02X}:00.0" for n in (0x08, 0x09, 0x18, 0x19)]
    given = {
        "buses": buses,
        "sm": 100,
        "title": "NVIDIA GB200",
        "links": [[("FFFFFFFF:FFFF:FF", NVSWITCH)] * 18 for _ in buses],
        "ancestors": lambda a, b: 40 if a // 2 == b // 2 else 50,
        "joined": pairs([range(4)]),
        "speed": 50000,
        "fabric": (bytes(range(1, 17)), 7, 3),
    }
    return Recorded(**given | changes)


def l40s(**changes):
    """Two L40S: no NVLink at all, and a driver that refuses to speak of it."""
    given = {
        "buses": ["00000000:01:00.0", "00000000:C1:00.0"],
        "sm": 89,
        "title": "NVIDIA L40S",
        "links": [[], []],
        "ancestors": lambda a, b: 50,
        "joined": set(),
        "speed": 0,
    }
    return Recorded(**given | changes)
