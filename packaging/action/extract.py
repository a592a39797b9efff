#!/usr/bin/env python3
"""Writes the steps of action.yml, and the instructions of the Containerfile, as a bash library for packaging/action/test.

    extract.py ACTION CONTAINERFILE

It knows the few expressions that action.yml has, and refuses any other: a step that cannot be run here is not tested.
"""

import re
import shlex
import sys

import yaml


def value(text: str) -> str:
    """What a workflow would put in place of a value with expressions, as a word of bash."""

    def expression(match: re.Match[str]) -> str:
        name = match[1].strip()
        if found := re.fullmatch(r"inputs\.(\w+)", name):
            return f'"${{INPUT_{found[1]}}}"'
        if found := re.fullmatch(r"steps\.(\w+)\.outputs\.(\w+)", name):
            return f'"$(output {found[1]} {found[2]})"'
        if name in ("github.action_repository", "github.action_ref"):
            return '""'  # used from a folder, as here, it has neither
        sys.exit(f"extract: nobody has taught this test what '{name}' is")

    parts = re.split(r"(\$\{\{.*?\}\})", text)
    return "".join(re.sub(r"^\$\{\{(.*)\}\}$", expression, part) if part.startswith("${{") else shlex.quote(part) if part else "" for part in parts)


def action(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        described = yaml.safe_load(file)
    for name, about in described["inputs"].items():
        print(f": \"${{INPUT_{name}={shlex.quote(str(about.get('default', '')))}}}\"")
    calls = []
    for number, step in enumerate(described["runs"]["steps"]):
        if step["shell"] != "bash" or set(step) - {"name", "id", "shell", "env", "run"}:
            sys.exit(f"extract: the step '{step['name']}' has something that this test does not know")
        print(f"step_{number}() {{\n  say {shlex.quote(step['name'])}")
        print(f"  GITHUB_OUTPUT=$RUNNER_TEMP/output-{step.get('id', number)}; export GITHUB_OUTPUT; : >\"$GITHUB_OUTPUT\"")
        settings = " ".join(f"{name}={value(str(text))}" for name, text in step.get("env", {}).items())
        # a runner starts each step so
        print(f"  env {settings} bash --noprofile --norc -eo pipefail -c {shlex.quote(step['run'])}\n}}")
        calls.append(f"step_{number}")
    print("all_steps() { " + " && ".join(calls) + "; }")
    for name, about in described.get("outputs", {}).items():
        print(f"output_{name}() {{ printf '%s\\n' {value(about['value'])}; }}")


def image(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        text = re.sub(r"^#.*\n", "", file.read(), flags=re.M).replace("\\\n", " ")
    body = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(None, 1)
        if word == "ARG":
            name, default = rest.split("=", 1)
            body.append(f"{name}={default}")
        elif word == "RUN":
            body.append(re.sub(r"--mount=\S+\s*", "", rest))
        elif word == "ENV":
            body.append(f"IMAGE_ENV=({rest})")
        elif word == "USER":
            body.append(f"IMAGE_USER={rest}")
        elif word == "CMD":
            body.append(f"IMAGE_CMD=({' '.join(shlex.quote(part) for part in yaml.safe_load(rest))})")
        elif word not in ("FROM", "LABEL", "WORKDIR"):
            sys.exit(f"extract: this test does not know {word}")
    print("image() {\nset -e\n" + "\n".join(body) + "\n}")


action(sys.argv[1])
image(sys.argv[2])
