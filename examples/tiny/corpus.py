"""Collect Python sources of this machine that may be trained on; clean, deduplicate and split them by package.

Sources are the standard library and the installed packages whose metadata names a permissive license. Whole packages
are held out by a hash of their name, and a held-out file that shares code with a training file is dropped.
"""

import hashlib
import importlib.metadata
import multiprocessing
import random
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Corpus", "Source", "collect_corpus", "packages_of"]

PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|HPND|Unlicense)\b", re.I)
RESTRICTIVE = re.compile(r"GPL|MPL|Mozilla|NVIDIA|Proprietary|EULA|Commercial|Other/", re.I)
VENDORED = re.compile(r"/(_?vendor\w*|_?vendored|externals?|extern|third_party)/")
SHINGLE = 8  # consecutive lines that count as shared code
MAX_SHARED = 0.2


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file: the package it is counted under (`stdlib/json`, `numpy`), its path and its cleaned text."""

    package: str
    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out files, and the license that each admitted package declares."""

    train: list[Source]
    held_out: list[Source]
    licenses: dict[str, str]


def collect_corpus(limit: int | None) -> Corpus:
    """Read, clean and deduplicate the sources, then split them by package; `limit` keeps that many files."""
    licenses = declared_licenses()
    files = find_files(licenses)
    if limit is not None:
        files = random.Random(0).sample(files, min(limit, len(files)))
    # Forked workers share the parent's seed of hash(), which Shared relies on.
    with multiprocessing.get_context("fork").Pool() as pool:
        texts = pool.map(cleaned_text, [path for _, path in files], chunksize=64)
        unique = {}
        for (package, path), text in zip(files, texts):
            if text is not None:
                unique.setdefault(
                    hashlib.blake2b(text.encode()).digest(), Source(package=package, path=str(path), text=text)
                )
        sizes = Counter()
        for source in unique.values():
            sizes[source.package] += len(source.text)
        most = 0.05 * sizes.total()
        held = {package for package, size in sizes.items() if is_held_out(package) and size <= most}
        train = [source for source in unique.values() if source.package not in held]
        apart = [source for source in unique.values() if source.package in held]
        shingles = [shingles_of(source.text) for source in apart]
        wanted = frozenset().union(*shingles)
        shared = set().union(*pool.imap(Shared(wanted), [source.text for source in train], chunksize=64))
    clean = [s for s, ngrams in zip(apart, shingles) if len(ngrams & shared) <= MAX_SHARED * len(ngrams)]
    print(
        f"{len(files)} files, {len(unique)} kept, {len(apart) - len(clean)} of {len(apart)} held-out share code",
        flush=True,
    )
    return Corpus(train=train, held_out=clean, licenses=licenses)


def packages_of(corpus: Corpus) -> dict[str, dict]:
    """Return by name the license, MB and whether it was held out; the standard library is one name per side."""
    sizes = Counter()
    for side, sources in (("train", corpus.train), ("held out", corpus.held_out)):
        for source in sources:
            name = "stdlib" if source.package.startswith("stdlib/") else source.package.removesuffix(".py")
            sizes[name, side] += len(source.text.encode())
    licenses = {"stdlib": "PSF-2.0"} | {k.removesuffix(".py"): v for k, v in corpus.licenses.items()}
    return {
        f"{name} ({side})": {"license": licenses[name], "megabytes": round(size / 1e6, 3)}
        for (name, side), size in sizes.most_common()
    }


def is_held_out(package: str) -> bool:
    return hashlib.blake2b(package.encode()).digest()[0] % 20 == 0


def declared_licenses() -> dict[str, str]:
    """Return licenses by top-level name in site-packages, if all owners of it declare a permissive one."""
    licenses, refused = {}, set()
    for distribution in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")]):
        metadata = distribution.metadata
        license = metadata.get("License-Expression")
        if license is None:
            classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier", []) if c.startswith("License")]
            field = metadata.get("License") or ""
            license = "; ".join(classifiers + [field] * (0 < len(field) < 100))
        admitted = PERMISSIVE.search(license) is not None and RESTRICTIVE.search(license) is None
        for name in {file.parts[0] for file in distribution.files or () if file.suffix == ".py"}:
            if admitted:
                licenses[name] = license
            else:
                refused.add(name)
    return {name: license for name, license in licenses.items() if name not in refused}


def find_files(licenses: dict[str, str]) -> list[tuple[str, Path]]:
    """Return (package, path) of every candidate file, sorted."""
    stdlib, installed = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    paths = []
    for path in stdlib.rglob("*.py"):
        top = path.relative_to(stdlib).parts[0]
        if top not in ("site-packages", "dist-packages"):
            paths.append((f"stdlib/{top.removesuffix('.py')}", path))
    for name in licenses:
        top = installed / name
        paths += [(name, path) for path in (top.rglob("*.py") if top.is_dir() else [top])]
    return sorted((package, path) for package, path in paths if VENDORED.search(str(path)) is None)


def cleaned_text(path: Path) -> str | None:
    """Return the text without its license header, or None if it looks generated or is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    lines = [line.rstrip() for line in text.splitlines()]
    head = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    if re.search(r"licen[cs]e|copyright", "\n".join(lines[:head]), re.I):
        lines = lines[head:]
    text = "\n".join(lines).strip("\n") + "\n"
    if not 200 <= len(text) <= 200_000 or max(map(len, lines)) > 300 or len(text) > 60 * len(lines):
        return None
    return text if sum(map(str.isalpha, text)) > 0.4 * len(text) else None


def shingles_of(text: str) -> set[int]:
    """Return the hashes of every SHINGLE consecutive lines, blank lines left out."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {hash(tuple(lines[i : i + SHINGLE])) for i in range(max(1, len(lines) - SHINGLE + 1))}


@dataclass(frozen=True)
class Shared:
    """Callable for the pool: the shingles of a text that are among `wanted`."""

    wanted: frozenset[int]

    def __call__(self, text: str) -> set[int]:
        return shingles_of(text) & self.wanted
