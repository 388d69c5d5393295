"""Finds the address of a network interface of this machine, by the interface's name.

It opens no socket; `base/tcp.py` finds the address from which this machine reaches another one.
"""

from __future__ import annotations

import ipaddress
import socket

from dtrain.errors import ConfigurationError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def interface_address(name: str, *, six: bool = False) -> str:
    """An IP address of an interface, of IPv4 if it has one, else of IPv6; never a link-local address.

    Args:
        name: the interface, such as `eth1`.
        six: whether to prefer an IPv6 address.

    Raises:
        ConfigurationError: there is no such interface, or it has no such address.
    """
    import psutil  # imported late, so that `dtrain --help` stays fast

    there = psutil.net_if_addrs()
    if name not in there:
        raise ConfigurationError(
            f"There is no network interface {name!r} on {socket.gethostname()}.",
            hint=f"It has {', '.join(there)}. `ip address` lists them.",
        )
    for family in reversed(_FAMILIES) if six else _FAMILIES:
        for entry in there[name]:
            address = entry.address.partition("%")[0]
            if entry.family == family and not ipaddress.ip_address(address).is_link_local:
                return address
    raise ConfigurationError(
        f"The network interface {name!r} of {socket.gethostname()} has no IP address.",
        hint="Name another one, or give it an address. `ip address` lists them.",
    )
