"""Documents of machines that the files of tests/data/topology do not show."""


def document(*inside, affinity="ff", version=1):
    """Return a document of one NUMA node."""
    cpu = f"<cpu numaid='0' affinity='{affinity}'>{''.join(inside)}</cpu>"
    return f"<system version='{version}'>{cpu}</system>"


def gpu(bus, links=(), *, sm=80, speed="16.0 GT/s PCIe", width=16, tag="nvlink", gcn=""):
    """Return a GPU; links are (target, count, class)."""
    inner = "".join(
        f"<{tag} target='{target}' count='{count}' tclass='{tclass}'/>"
        for target, count, tclass in links
    )
    one = f"<gpu dev='0' sm='{sm}' rank='0' gdr='1' gcn='{gcn}'>{inner}</gpu>"
    link = f"link_speed='{speed}' link_width='{width}'"
    return f"<pci busid='{bus}' class='0x030200' {link}>{one}</pci>"
