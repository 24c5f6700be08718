"""Certificates to and from the JSON of an archive."""

import dataclasses
import json
from typing import Any

from detcompile import orders
from detcompile.orders.numerics import Numerics
from detcompile.orders.sum_order import SumOrder
from detcompile.passes.proof.certificate import Certificate, Entry

__all__ = ["certificate_json", "read_certificate"]


def certificate_json(certificate: Certificate) -> bytes:
    """Serialize a certificate as JSON."""
    entries = [dataclasses.asdict(entry) for entry in certificate.entries]
    sums = [_order_json(order) for order in certificate.sums]
    return json.dumps({"entries": entries, "sums": sums}, indent=1).encode()


def read_certificate(content: dict[str, Any], numerics: Numerics) -> Certificate:
    """Return the certificate that ``certificate_json`` wrote. Malformed content raises any exception."""
    entries = tuple(Entry(**{**entry, "holds_for": tuple(entry["holds_for"])}) for entry in content["entries"])
    return Certificate(entries, numerics, tuple(_order(order) for order in content["sums"]))


def _order_json(order: SumOrder) -> dict[str, Any]:
    fields = {field.name: getattr(order, field.name) for field in dataclasses.fields(order)}  # type: ignore[arg-type]
    nested = {name: _order_json(value) if isinstance(value, SumOrder) else value for name, value in fields.items()}
    return {"order": type(order).__name__, **nested}


def _order(content: dict[str, Any]) -> SumOrder:
    kind = getattr(orders, content["order"])
    if not (isinstance(kind, type) and issubclass(kind, SumOrder)):
        raise ValueError(f"{content['order']} is not a SumOrder")
    fields = {name: _order(value) if isinstance(value, dict) else value for name, value in content.items()}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items() if name != "order"})
