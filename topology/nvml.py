"""The GPUs of this host, asked from NVML (the module ``pynvml`` of nvidia-ml-py).

Every query is optional: what a container, a virtual machine, an old driver or MIG does not answer
is None, and named in a warning where it matters. GPUs are known by their bus id and UUID; the order
of NVML is not that of CUDA. Which pairs NVLink joins is asked for each pair
(``nvmlDeviceGetP2PStatus``); the state of single links only counts them: it says nothing of pairs.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from topology.relations import nvlink_gbytes, pair_paths
from topology.sysfs import short_bus
from topology.system import Gpu, Path, System

SOURCE = "nvml"
_MAX_LINKS = ((90, 18), (89, 0), (80, 12), (70, 6), (60, 4))
"""Links of a GPU from this compute capability on; Ada has none."""
_MOST = 18  # where it is not known
_ANCESTORS: dict[Any, str] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_GET_SPEED, _GET_STATE = 164, 165  # fields NVML_FI_DEV_NVLINK_GET_*
_INDEX_NVLINK, _OK, _UNKNOWN = 2, 0, 6  # NVML_P2P_*
_GPU_KIND, _SWITCH, _COMPLETED = 0, 2, 3  # NVML_NVLINK_DEVICE_TYPE_*, NVML_GPU_FABRIC_STATE_*
_UP = (1, 2)  # NVML_NVLINK_STATE_ACTIVE, _SLEEP: a link that saves power is none that is down


@dataclass
class _Links:
    """Active links of one GPU: how many, to switches, and to bus ids of GPUs."""

    active: int = 0
    to_switch: int = 0
    peers: dict[str, int] | None = None
    gbytes: float | None = None


def load() -> Any | None:
    """Return the module pynvml, started; None without it or without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        # No module, no library, no driver, no permission: there is nothing to ask.
        return None
    return pynvml


def probe(api: Any, host: str = "") -> System:
    """Return what NVML says of all GPUs that this process may see.

    Args:
        api: the module pynvml, or what answers like it, started.
        host: the name of this host.
    """
    asking = _Asking(api)
    handles = []
    for index in range(asking.ask("nvmlDeviceGetCount") or 0):
        handle = asking.ask("nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            handles.append(handle)
    gpus, links = [], []
    for number, handle in enumerate(handles):
        gpu = _gpu(asking, handle, number)
        found = _Links() if gpu.mig else _links(asking, handle, gpu.sm)
        links.append(found)
        gpus.append(_with_links(gpu, found))
    paths, warnings = _paths(asking, handles, gpus, links)
    for number, gpu in enumerate(gpus):
        if gpu.nvlinks is None and _denied(asking, handles, number):
            gpus[number] = replace(gpu, nvlinks=0)
    return System(
        (host,),
        gpus=tuple(gpus),
        paths=tuple(paths),
        warnings=(*asking.warnings, *warnings),
        source=SOURCE,
    )


class _Asking:
    """Queries of which each may fail, also because this NVML does not have them."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.warnings: list[str] = []

    def ask(self, name: str, *arguments: Any) -> Any | None:
        """Return the answer; None and a warning where NVML refuses."""
        try:
            return getattr(self.api, name)(*arguments)
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            warning = f"NVML refuses {name}: {words}"
            if warning not in self.warnings:
                self.warnings.append(warning)
            return None

    def maybe(self, name: str, *arguments: Any) -> Any | None:
        """Return the answer; None where NVML refuses, as many drivers do."""
        try:
            return getattr(self.api, name)(*arguments)
        except Exception:
            return None

    def field(self, handle: Any, field: int, link: int) -> int | None:
        """Return the value of a field of a link."""
        values = self.maybe("nvmlDeviceGetFieldValues", handle, [(field, link)])
        return int(values[0].value.uiVal) if values and values[0].nvmlReturn == 0 else None

    def domain(self, handle: Any) -> str | None:
        """Return cluster UUID and clique of a fabric that is up; a UUID of zeros is none."""
        try:
            info = self.api.c_nvmlGpuFabricInfoV_t()
            self.api.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
        except Exception:
            return None
        uuid = bytes(info.clusterUuid)
        if info.state != _COMPLETED or info.status != 0 or not any(uuid):
            return None
        return f"{uuid.hex()}/{info.cliqueId}"


def _gpu(asking: _Asking, handle: Any, number: int) -> Gpu:
    pci = asking.ask("nvmlDeviceGetPciInfo", handle)
    capability = asking.maybe("nvmlDeviceGetCudaComputeCapability", handle)
    mig = asking.maybe("nvmlDeviceGetMigMode", handle)
    return Gpu(
        f"GPU{number}",
        0,
        bus=None if pci is None else short_bus(_text(pci.busId)),
        uuid=_optional(asking.maybe("nvmlDeviceGetUUID", handle)),
        title=_optional(asking.maybe("nvmlDeviceGetName", handle)),
        sm=None if capability is None else capability[0] * 10 + capability[1],
        domain=asking.domain(handle),
        mig=mig is not None and mig[0] == 1,
        source=SOURCE,
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _optional(value: str | bytes | None) -> str | None:
    return None if value is None else _text(value)


def _links(asking: _Asking, handle: Any, sm: int | None) -> _Links | None:
    """Count the active links; None where the driver does not say."""
    most = next((links for first, links in _MAX_LINKS if (sm or 0) >= first), 0)
    most = _MOST if sm is None else most
    states = [_state(asking, handle, link, sm) for link in range(most)]
    if most and all(state is None for state in states):
        return None
    found = _Links(peers={})
    for link, state in enumerate(states):
        if state in _UP:
            _count(asking, handle, link, found)
    if found.active:
        speed = asking.field(handle, _GET_SPEED, 0)
        found.gbytes = speed / 1000 if speed else nvlink_gbytes(sm)
    return found


def _state(asking: _Asking, handle: Any, link: int, sm: int | None) -> int | None:
    if sm is None or sm >= 90:
        state = asking.field(handle, _GET_STATE, link)
        if state is not None:
            return state
    return asking.maybe("nvmlDeviceGetNvLinkState", handle, link)


def _count(asking: _Asking, handle: Any, link: int, found: _Links) -> None:
    found.active += 1
    remote = asking.maybe("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    bus = short_bus(_text(remote.busId)) if remote else ""
    kind = asking.maybe("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    # In a virtual machine the switch at the other end is not to be seen.
    hidden = not bus or bus.startswith("fffffff")
    if kind == _SWITCH or (kind != _GPU_KIND and hidden):
        found.to_switch += 1
    elif bus and found.peers is not None:
        found.peers[bus] = found.peers.get(bus, 0) + 1


def _with_links(gpu: Gpu, links: _Links | None) -> Gpu:
    if links is None:
        return gpu
    each = links.gbytes
    switched = links.to_switch > 0
    return replace(gpu, nvlinks=links.active, link_gbytes=each, switched=switched)


def _paths(
    asking: _Asking, handles: list[Any], gpus: list[Gpu], links: list[_Links | None]
) -> tuple[list[Path], list[str]]:
    """Return NVLink and PCIe paths of all pairs, and what contradicts itself."""
    number_of = {gpu.bus: number for number, gpu in enumerate(gpus)}
    counted: dict[tuple[int, int], Path] = {}
    for number, found in enumerate(links):
        for bus, num_links in ((found.peers or {}) if found else {}).items():
            peer = number_of.get(bus)
            if peer is not None and peer != number:
                ends = min(number, peer), max(number, peer)
                counted[number, peer] = Path(*ends, "NV", num_links)
    paths, warnings = pair_paths(gpus, counted, SOURCE)
    paths = [path for path in paths if _usable(asking, handles, gpus, path, warnings)]
    known = {(path.a, path.b) for path in paths}
    uncounted = []
    for a, b in combinations(range(len(gpus)), 2):
        status = _status(asking, handles[a], handles[b])
        if status == _OK and (a, b) not in known and not (gpus[a].mig or gpus[b].mig):
            paths.append(Path(a, b, "NV", 1, source=f"{SOURCE} p2p status"))
            uncounted.append(f"{gpus[a].name}-{gpus[b].name}")
        name = "nvmlDeviceGetTopologyCommonAncestor"
        kind = _ANCESTORS.get(asking.maybe(name, handles[a], handles[b]))
        if kind is not None:
            paths.append(Path(a, b, kind, source=f"{SOURCE} common ancestor"))
    if uncounted:
        warnings.append(
            f"NVLink joins {few(uncounted)}, NVML does not say by how many links: 1 is taken"
        )
    return paths, warnings + _unused(asking, handles, gpus, links, paths)


def _unused(
    asking: _Asking,
    handles: list[Any],
    gpus: list[Gpu],
    links: list[_Links | None],
    paths: list[Path],
) -> list[str]:
    """Name the GPUs whose links may join GPUs of this host, which NVML does not say."""
    joined = {end for path in paths if path.kind == "NV" for end in (path.a, path.b)}
    lonely = []
    for number, found in enumerate(links):
        others = [handle for other, handle in enumerate(handles) if other != number]
        silent = {_status(asking, handles[number], other) for other in others} & {None, _UNKNOWN}
        open_ended = found is None or (found.active > 0 and not found.to_switch)
        if number not in joined and open_ended and silent:
            lonely.append(gpus[number].name)
    if not lonely:
        return []
    return [f"NVML does not say whether NVLink joins {few(lonely)} to others: it is not used"]


def few(names: list[str]) -> str:
    """Return names in words, of many the first."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"


def _status(asking: _Asking, first: Any, second: Any) -> int | None:
    return asking.maybe("nvmlDeviceGetP2PStatus", first, second, _INDEX_NVLINK)


def _denied(asking: _Asking, handles: list[Any], number: int) -> bool:
    """Say whether NVML denies NVLink between a GPU and each other."""
    others = [handle for other, handle in enumerate(handles) if other != number]
    statuses = [_status(asking, handles[number], other) for other in others]
    return bool(statuses) and not {None, _UNKNOWN, _OK} & set(statuses)


def _usable(
    asking: _Asking, handles: list[Any], gpus: list[Gpu], path: Path, warnings: list[str]
) -> bool:
    """Say whether NVML lets a pair use its NVLink; what it does not know is no "no"."""
    status = _status(asking, handles[path.a], handles[path.b])
    if status in (None, _UNKNOWN, _OK):
        return True
    warnings.append(
        f"{gpus[path.a].name} and {gpus[path.b].name} have NVLinks, but NVML's P2P status of the "
        f"pair is {status}: they are not used"
    )
    return False
