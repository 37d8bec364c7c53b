#!/usr/bin/env python3
"""The trainer and its lessons stay in step: every kernel of train_moe.cu stands in dev/cuda under the same name with the same
tokens, and what dev/cuda calls the best is what the trainer launches.

    python3 dev/test/check_drift.py          prints what differs, one line each; exit code 1 if anything does

Compared are all __global__ and __device__ functions, structs with __device__ members, and the structs and constants that these
use; comments and white space do not count. Each dev/cuda/*.cu says `// winner: N`: of each kernel `name_kernelK` in it the trainer
runs the one with the largest K up to N. Where N is a library's call, the line names the trainer's function, or the header whose
functions the trainer has: `// winner: 2 (gemm)`. Other words in brackets, and other winners behind a comma, are for readers.
When this fails, move the better version to the other side; the list below is not the place to mend it.
"""
import argparse
import glob
import os
import re
import sys

# What the trainer launches though dev/cuda knows better: rungs of the ladder, each behind an option. Launcher: reason.
RUNGS = {
    "attention_naive_forward": "--attention naive: the readable one, and what flash attention is compared with",
    "attention_naive_backward": "--attention naive",
    "experts_loop_forward": "--experts loop: one library call an expert, and what the grouped kernels are compared with",
    "experts_loop_backward": "--experts loop",
    "adamw_simple": "--optimizer simple: the textbook's passes, and what the fused kernel is compared with",
}

TOKEN = re.compile(r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|\\\n)
  | (?P<text>(?:u8|[uUL])?R"(?P<d>[^()\s\\]{0,16})\(.*?\)(?P=d)"|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
  | (?P<word>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*)
  | (?P<sign><<<|>>>|->\*|\.\.\.|<<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|/=|%=|&=|\|=|\^=|::|.)
""", re.X | re.S)
DIRECTIVE = re.compile(r"(?m)^[ \t]*#[ \t]*(\w+)((?:[^\n\\]|\\.|\\\n)*)", re.S)


class Token:
    def __init__(self, text, line):
        self.text, self.line = text, line


def tokens_of(source):
    """A list of tokens. `#pragma unroll` is one, other directives are left out."""
    def directive(match):
        lines = "\n" * match.group(0).count("\n")
        kept = match.group(1) == "pragma" and "unroll" in match.group(2)
        return ("__pragma__(%s)" % match.group(2).strip() if kept else "") + lines
    source, found, line = DIRECTIVE.sub(directive, source), [], 1
    for match in TOKEN.finditer(source):
        if match.lastgroup != "space":
            text = match.group(0)
            closers = text in (">>", ">>>")  # of templates, shifts or launches: one by one, for the sake of the first
            found += [Token(">", line)] * len(text) if closers else [Token(text, line)]
        line += match.group(0).count("\n")
    return found


class Piece:
    """A declaration of a file: a function, a type, a constant."""

    def __init__(self, kind, name, tokens, path):
        self.kind, self.name, self.path = kind, name, path
        self.texts, self.lines = [t.text for t in tokens], [t.line for t in tokens]

    def place(self, i=0):
        return f"{self.path}:{self.lines[min(i, len(self.lines) - 1)]}"

    def on_device(self):
        """__global__ or __device__ in front of the body; in a struct anywhere."""
        head = self.texts if self.kind == "type" else self.texts[:self.texts.index("{")]
        return "__global__" in head or "__device__" in head

    def is_kernel(self):
        return self.kind == "function" and "__global__" in self.texts[:self.texts.index("{")]


def closing(tokens, i, opening="{", close="}"):
    """Index of what closes tokens[i]."""
    depth = 0
    for j in range(i, len(tokens)):
        depth += (tokens[j].text == opening) - (tokens[j].text == close)
        if depth == 0:
            return j
    raise SystemExit(f"check_drift.py: line {tokens[i].line}: a {opening} is never closed")


def without_brackets(tokens):
    """The outermost level of a declaration's head: no template lists, no launch bounds or alignment."""
    kept, i = [], 0
    while i < len(tokens):
        if tokens[i].text == "template":
            i = closing(tokens, i + 1, "<", ">") + 1
        elif tokens[i].text in ("__launch_bounds__", "__align__", "alignas", "__attribute__"):
            i = closing(tokens, i + 1, "(", ")") + 1
        else:
            kept.append(tokens[i])
            i += 1
    return kept


def function_name(head):
    plain = [t.text for t in without_brackets(head)]
    at = plain.index("(")
    return "".join(plain[plain.index("operator"):at]) if "operator" in plain[:at] else plain[at - 1]


def constants_of(tokens, path):
    """NAME = value, of an enum's body or of `const int A = 1, B = 2;`."""
    pieces, i = [], 0
    while i < len(tokens):
        end, depth = i, 0
        while end < len(tokens) and (depth or tokens[end].text not in (",", ";")):
            depth += (tokens[end].text in "([{") - (tokens[end].text in ")]}")
            end += 1
        texts = [t.text for t in tokens[i:end]]
        if "=" in texts and texts.index("=") > 0:
            pieces.append(Piece("constant", texts[texts.index("=") - 1], tokens[i + texts.index("=") + 1:end], path))
        i = end + 1
    return [p for p in pieces if p.texts]


def pieces_of(tokens, path):
    """Every declaration at the level of the file (and of the namespaces in it)."""
    found, i = [], 0
    while i < len(tokens):
        begin = i
        while i < len(tokens) and tokens[i].text not in ("{", ";", "}"):
            i = closing(tokens, i, "(", ")") + 1 if tokens[i].text == "(" else i + 1
        head = tokens[begin:i]
        words = [t.text for t in without_brackets(head)]
        if i == len(tokens) or tokens[i].text in (";", "}"):
            if "=" in words and ("const" in words or "constexpr" in words):
                found += constants_of(head, path)
            i += 1
        elif "namespace" in words or words[:1] == ["extern"] and len(words) == 2:
            end = closing(tokens, i)
            found += pieces_of(tokens[i + 1:end], path)
            i = end + 1
        elif "(" in words and "=" not in words:
            end = closing(tokens, i) + 1
            found.append(Piece("function", function_name(head), tokens[begin:end], path))
            i = end
        else:  # a type or an initialised variable: up to the semicolon
            end = closing(tokens, i)
            if "enum" in words:
                found += constants_of(tokens[i + 1:end], path)
            elif "struct" in words or "union" in words:
                name = [w for w in words if w not in ("typedef", "struct", "union", "static", "const")]
                after = tokens[end + 1].text
                found.append(Piece("type", name[0] if name else after, tokens[begin:end + 1], path))
            while end < len(tokens) and tokens[end].text != ";":
                end += 1
            i = end + 1
    return found


def read_pieces(path, root):
    with open(path, encoding="utf-8") as f:
        return pieces_of(tokens_of(f.read()), os.path.relpath(path, root))


def difference(a, b):
    """One line that names the first token in which two pieces differ."""
    n = next((i for i, (x, y) in enumerate(zip(a.texts, b.texts)) if x != y), min(len(a.texts), len(b.texts)))
    def shown(p):
        return " ".join(p.texts[max(n - 3, 0):n + 4]) or "nothing"
    return f"{a.place(n)}: {a.name} has `{shown(a)}`, {b.place(n)} has `{shown(b)}`", n


def compare(trainer, lessons):
    """Lines about what stands in the trainer and not, or otherwise, in dev/cuda."""
    by_name, faults = {}, []
    for p in lessons:
        by_name.setdefault((p.kind, p.name), []).append(p)
    device = [p for p in trainer if p.kind != "constant" and p.on_device()]
    used = {text for p in device for text in p.texts}
    for p in trainer:
        needed = p in device or p.kind in ("constant", "type") and p.name in used
        twins = by_name.get((p.kind, p.name), [])
        if not needed or any(q.texts == p.texts for q in twins):
            continue
        if not twins:
            if p in device or p.kind == "type":
                faults.append(f"{p.place()}: {p.name} stands in no file of dev/cuda")
            continue  # a constant may be written out there
        faults.append(max((difference(p, q) for q in twins), key=lambda line_and_n: line_and_n[1])[0])
    return faults


def number_of(kernel):
    """(stem, number) of `rmsnorm_forward_kernel3`."""
    match = re.fullmatch(r"(\w+)_kernel(\d+)", kernel)
    return (match.group(1), int(match.group(2))) if match else (kernel, None)


def users_of(trainer, name):
    return [p for p in trainer if p.kind == "function" and not p.on_device() and name in p.texts and p.name != name]


def rung_functions(trainer):
    """The launchers in RUNGS and host functions that only they call."""
    rungs = {p.name for p in trainer if p.name in RUNGS}
    hosts = {p.name for p in trainer if p.kind == "function" and not p.on_device()}
    while True:
        callers = {name: {p.name for p in users_of(trainer, name)} for name in hosts - rungs}
        more = {name for name, by in callers.items() if by and by <= rungs}
        if not more:
            return rungs
        rungs |= more


def local_headers(path):
    """Headers beside a dev file that it includes, directly or through another one."""
    found, todo = [], [path]
    while todo:
        with open(todo.pop(), encoding="utf-8") as f:
            names = re.findall(r'(?m)^#include "([^"/]+)"', f.read())
        new = [os.path.join(os.path.dirname(path), n) for n in names]
        new = [h for h in new if os.path.exists(h) and h not in found]
        found, todo = found + new, todo + new
    return found


def compare_library(trainer, shown, winner, words, pieces_by_name):
    """The winner is no kernel: it is the trainer's function, or the functions of a header, that call a library."""
    hosts = {p.name: p for p in trainer if p.kind == "function" and not p.on_device()}
    headers = [w for w in words if w in pieces_by_name]
    functions = [p for h in headers for p in pieces_by_name[h] if p.kind == "function"]
    named = [w for w in words if w in hosts]
    if not functions and not named:
        return [f"{shown}: winner {winner} is no kernel in it; of a library's call name the trainer's function: // winner: {winner} (FUNCTION)"]
    faults = [f"{shown}: the trainer does not call the winner {winner}, {w}" for w in named if not users_of(trainer, w)]
    for p in functions:
        if p.name not in hosts:
            faults.append(f"{p.place()}: the trainer has no {p.name}, which is the winner {winner}")
        elif hosts[p.name].texts != p.texts:
            faults.append(difference(hosts[p.name], p)[0])
    return faults


def compare_winners(trainer, root, pieces_by_path):
    """Lines about winners that the trainer does not run, and about kernels it runs that are no winner."""
    faults, winners, known = [], set(), set()
    for path in sorted(glob.glob(os.path.join(root, "dev", "cuda", "*.cu"))):
        shown = os.path.relpath(path, root)
        with open(path, encoding="utf-8") as f:
            said = re.findall(r"(?m)^// winner: (\d.*)$", f.read())
        if len(said) != 1:
            faults.append(f"{shown}: has {len(said)} lines `// winner: N`, must have one")
            continue
        winner = max(int(number) for number in re.findall(r"(?:^|,)\s*(\d+)", re.sub(r"\([^)]*\)", "", said[0])))
        words = re.findall(r"[\w.]+", " ".join(re.findall(r"\(([^)]*)\)", said[0])))
        stems = {}
        for p in [p for q in [path, *local_headers(path)] for p in pieces_by_path[q] if p.is_kernel()]:
            stem, number = number_of(p.name)
            known.add(p.name)
            if number is None:
                faults.append(f"{p.place()}: {p.name}: a kernel's name must end with _kernel and its number")
            elif number <= winner:
                stems.setdefault(stem, []).append(number)
        mine = {f"{stem}_kernel{max(numbers)}" for stem, numbers in stems.items()}
        winners |= mine
        numbered = [name for name in mine if number_of(name)[1] == winner]
        if not numbered:
            faults += compare_library(trainer, shown, winner, words, {os.path.basename(p): q for p, q in pieces_by_path.items()})
        for name in numbered:
            if not users_of(trainer, name):
                faults.append(f"{shown}: the trainer does not launch the winner, {name}")
    rungs = rung_functions(trainer)
    for p in trainer:
        if not p.kind == "function" or not p.is_kernel() or p.name not in known:
            continue  # what dev/cuda does not know is a fault already
        users = [q.name for q in users_of(trainer, p.name)]
        if not users:
            faults.append(f"{p.place()}: {p.name} is launched nowhere")
        elif p.name not in winners and not set(users) <= rungs:
            faults.append(f"{p.place()}: {p.name} is not what dev/cuda calls the winner")
    return faults


def check(root):
    trainer = read_pieces(os.path.join(root, "train_moe.cu"), root)
    paths = [p for end in ("cu", "h") for p in sorted(glob.glob(os.path.join(root, "dev", "cuda", "*." + end)))]
    pieces_by_path = {path: read_pieces(path, root) for path in paths}
    lessons = [p for pieces in pieces_by_path.values() for p in pieces]
    kernels = sum(p.kind == "function" and p.is_kernel() for p in trainer)
    faults = compare(trainer, lessons) + compare_winners(trainer, root, pieces_by_path)
    faults += [f"check_drift.py lists {name}, which the trainer does not have" for name in RUNGS
               if not any(p.name == name for p in trainer)]
    if kernels == 0:
        faults.append("train_moe.cu: not one kernel found")
    return faults, kernels, sum(p.kind != "constant" and p.on_device() for p in trainer)


def main():
    a = argparse.ArgumentParser(description="compare train_moe.cu with dev/cuda")
    a.add_argument("--root", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    faults, kernels, functions = check(os.path.realpath(a.parse_args().root))
    for line in faults:
        print(line)
    print(f"{kernels} kernels, {functions} device functions and structs: {len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
