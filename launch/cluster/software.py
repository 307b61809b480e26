"""Is a machine's software and data the same as here? No torch.

`facts` and `here` are answers of `launch.cluster.probe.facts`: of the machine, and of the one that starts the run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from launch.cluster.finding import Finding

PACKAGES = (
    "torch", "deepspeed", "transformers", "tokenizers", "safetensors", "datasets", "accelerate", "peft", "numpy",
    "jsonargparse", "pyyaml", "rich",
)  # fmt: skip
"""Distributions whose versions must agree."""
_MOST_NAMED = 3
Facts = Mapping[str, Any]


def python_findings(host: str, facts: Facts, here: Facts) -> Iterator[Finding]:
    """Interpreter and its version."""
    found, expected = (f"{each['python']} at {each['executable']}" for each in (facts, here))
    if found == expected:
        yield Finding(check="python", host=host, status="ok", found=found)
    else:
        yield Finding(
            check="python", host=host, status="failed", found=found, expected=expected,
            repair="deepspeed starts ranks with the path of this interpreter: install the same one there.",
        )  # fmt: skip


def package_findings(host: str, facts: Facts, here: Facts) -> Iterator[Finding]:
    """Versions of the packages that ranks import."""
    wanted, other = here["packages"], facts["packages"]
    differ = [name for name in wanted if other.get(name) != wanted[name]]
    if not differ:
        yield Finding(check="packages", host=host, status="ok", found=f"{len(wanted)} the same as here")
        return
    pins = " ".join(f"{name}=={wanted[name]}" for name in differ if wanted[name])
    yield Finding(
        check="packages", host=host, status="failed",
        found=", ".join(f"{name} {other.get(name) or 'not installed'}" for name in differ),
        expected=", ".join(f"{name} {wanted[name] or 'not installed'}" for name in differ),
        repair=f"There: {facts['executable']} -m pip install {pins}" if pins else "Remove them there.",
    )  # fmt: skip


def torch_findings(host: str, facts: Facts) -> Iterator[Finding]:
    """Whether torch can be imported."""
    torch = facts["torch"]
    if "error" in torch:
        yield Finding(
            check="torch", host=host, status="failed", found=f"cannot be imported: {torch['error']}",
            repair=f"See `{facts['executable']} -c 'import torch'` there, and install torch anew.",
        )  # fmt: skip
    else:
        yield Finding(check="torch", host=host, status="ok", found=f"{torch['version']} imports")


def code_findings(host: str, facts: Facts, here: Facts) -> Iterator[Finding]:
    """Our packages, file by file, at the path that ranks import them from."""
    differ = [text for name in here["code"] if (text := difference(here["code"][name], facts["code"][name], name))]
    commit = here["commit"][:12]
    if not differ:
        status = f"{sum(len(tree['files']) for tree in here['code'].values())} files the same as here"
        yield Finding(check="code", host=host, status="ok", found=f"{status}{', commit ' + commit if commit else ''}")
        return
    theirs = facts["commit"][:12]
    if commit and theirs and commit != theirs:
        differ.insert(0, f"commit {theirs}, here {commit}")
    yield Finding(
        check="code", host=host, status="failed", found="; ".join(differ), expected="the same files as here",
        repair="Bring that checkout to the same commit and changes, or put the code on a shared disk.",
    )  # fmt: skip


def folder_findings(host: str, facts: Facts, folder: str) -> Iterator[Finding]:
    """The working directory, into which pdsh changes before it starts ranks."""
    if facts["folder"]:
        yield Finding(check="working folder", host=host, status="ok", found=folder)
    else:
        yield Finding(
            check="working folder", host=host, status="failed", found=f"no folder {folder} that can be entered",
            expected="the one of this shell", repair="Make it there, or start from a folder that all machines have.",
        )  # fmt: skip


def path_findings(host: str, facts: Facts, here: Facts, paths: Mapping[str, str]) -> Iterator[Finding]:
    """Data and models on disk: there, readable, the same."""
    bad = False
    for name, path in paths.items():
        tree = facts["paths"][name]
        if tree.get("unreadable"):
            found = f"{name}={path}: cannot read {_some(tree['unreadable'])}"
            repair = "Give the user that ssh logs in as the right to read it."
        elif found := difference(here["paths"][name], tree, f"{name}={path}"):
            repair = "Copy it to the same path there, or put it on a shared disk."
        else:
            continue
        bad = True
        yield Finding(check="data and models", host=host, status="failed", found=found,
                      expected="the same files as here", repair=repair)  # fmt: skip
    if not bad:
        count = sum(len(facts["paths"][name].get("files", {})) for name in paths)
        yield Finding(
            check="data and models", host=host, status="ok" if paths else "none",
            found=f"{len(paths)} paths, {count} files the same as here" if paths else "none is read from a disk",
        )  # fmt: skip


def hub_findings(host: str, facts: Facts, here: Facts, *, offline: bool) -> Iterator[Finding]:
    """Models of the hub: the same commit in the cache, or the way open to download it."""
    for name, revision in here["hub"].items():
        found = facts["hub"][name]
        if found is None and offline:
            yield Finding(
                check="hub models", host=host, status="failed", found=f"{name} is not in the cache",
                expected="it to be there, since HF_HUB_OFFLINE is set",
                repair=f"There: hf download {name}; or set HF_HOME to a folder on a shared disk.",
            )  # fmt: skip
        elif found is not None and revision is not None and found != revision:
            yield Finding(
                check="hub models", host=host, status="failed", found=f"{name} at commit {found[:12]}",
                expected=f"{revision[:12]} as here", repair=f"There: hf download {name} --revision {revision}",
            )  # fmt: skip
        else:
            where = "in the cache" if found else "will be downloaded"
            yield Finding(check="hub models", host=host, status="ok", found=f"{name} {where}")


def difference(here: Facts, there: Facts, name: str) -> str:
    """How a copy differs from the one here, in words; "" if it does not."""
    if here["kind"] == "missing":
        return ""  # said by who looks at this machine
    if there["kind"] != here["kind"]:
        return f"{name} is {'not there' if there['kind'] == 'missing' else 'a ' + there['kind']}"
    ours, theirs = here["files"], there["files"]
    parts = []
    if missing := sorted(set(ours) - set(theirs)):
        parts.append(f"lacks {_some(missing)}")
    if more := sorted(set(theirs) - set(ours)):
        parts.append(f"has {_some(more)} too")
    if other := sorted(file for file in set(ours) & set(theirs) if ours[file] != theirs[file]):
        parts.append("has other contents" if other == [""] else f"has other contents in {_some(other)}")
    if not parts and here["more"] != there["more"]:
        parts.append(f"has {there['more']} files beyond the first {len(theirs)}, here {here['more']}")
    return f"{name} {', '.join(parts)}" if parts else ""


def _some(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
