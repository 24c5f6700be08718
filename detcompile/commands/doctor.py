"""`detcompile doctor`: shows what this machine has, and what is missing or slow."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from detcompile.commands.inspection.findings import Finding, findings
from detcompile.commands.inspection.machine import Machine, look_at_machine

STYLES = {"missing": "bold red", "slow": "yellow", "fast": "green", "note": "cyan"}
LABEL = 12  # columns


def command(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Look at this machine: what is here, what will be fast or slow; exit 1 if something needed is missing."""
    machine = look_at_machine()
    results = findings(machine)
    ready = all(finding.level != "missing" for finding in results)
    if json_output:
        print(json.dumps({"ready": ready, "machine": asdict(machine), "findings": [asdict(one) for one in results]}))
    else:
        _show(machine, results, ready)
    if not ready:
        raise typer.Exit(1)


def _show(machine: Machine, results: list[Finding], ready: bool) -> None:
    console = Console()
    for label, text in _facts(machine):
        console.print(Text(label.ljust(LABEL), "bold") + Text(text), soft_wrap=True)
    console.print()
    for finding in results:
        level = Text(finding.level.ljust(LABEL), STYLES[finding.level])
        console.print(level + Text(f"{finding.about}: {finding.text}"), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{' ' * LABEL}to do: {finding.advice}"), soft_wrap=True)
    console.print("\nEverything that is needed is here." if ready else "\nSomething that is needed is missing.")


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in machine.versions.items())
    yield "versions", versions
    yield "system", machine.system
    yield "CPU", _cpu(machine)
    gpus, compilers, cache = machine.gpus, machine.compilers, machine.cache
    for gpu in gpus.found:
        yield "GPU", f"{gpu.name}, {decimal(gpu.memory)}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if not gpus.found:
        yield "GPU", "none"
    if gpus.found or gpus.driver:
        yield "CUDA", f"driver {gpus.driver}, torch for CUDA {gpus.cuda}, ptxas {gpus.ptxas}"
    yield "C++", f"{compilers.cxx}: {compilers.version or 'does not run'}"
    yield "C", compilers.c or "none"
    holds = f"{decimal(cache.num_bytes)}, {decimal(cache.free)} free on its disk"
    yield "cache", f"{cache.folder or 'nowhere'}: {'cannot be used' if cache.failure else holds}"
    if machine.hub is not None:
        network = "offline" if machine.hub.offline else "online"
        yield "hub", f"HF_HOME {machine.hub.home}, {network}: models by name come from its cache, or the Hub"


def _cpu(machine: Machine) -> str:
    cpu = machine.cpu
    words = [cpu.name, f"{cpu.usable} of {cpu.cores} cores"]
    words += [f"a quota of {cpu.quota:g}"] if cpu.quota else []
    words += [f"{cpu.threads} threads"] if cpu.threads else []
    words += [f"{decimal(cpu.memory)} of memory"]
    words += [f"{decimal(cpu.available)} available"] if cpu.available is not None else []
    words += [f"kernels for {cpu.isa or 'none'} (of {', '.join(cpu.isas)})"] if cpu.isas else []
    return ", ".join(words)
