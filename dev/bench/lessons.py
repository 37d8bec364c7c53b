"""What bench_cuda.py and bench_cpu_ops.py share: the files of dev/cuda and dev/cpu, and the tables between markers in their READMEs."""
import os
import platform
import re
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(command, env=None):
    """(exit code, standard output, standard error) of a command that is run in the root."""
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ, **(env or {})))
    return r.returncode, r.stdout, r.stderr


def cpu_name():
    try:
        return re.search(r"model name\s*:\s*(.*)", open("/proc/cpuinfo").read()).group(1)
    except (OSError, AttributeError):
        return platform.machine()


class Op:
    """A kernel file: its name, its first sentence, and the numbers of the kernels that the trainer runs."""

    def __init__(self, path):
        self.path, self.file = path, os.path.basename(path)
        self.name = os.path.splitext(self.file)[0]
        text = open(path, encoding="utf-8").read()
        opening = re.sub(r"(?m)^\s*(?:/\*+|//|\*)? ?", "", text[:2000]).strip()
        first = opening.split("\n\n")[0].replace("\n", " ")
        first = re.sub(r"^%s(\.cu?)?:\s*" % re.escape(self.name), "", first)
        self.about = re.split(r"(?<=[.:])\s", first, maxsplit=1)[0].rstrip(".:")
        line = re.search(r"//\s*winner:\s*(.*)", text)
        self.winners = sorted({int(n) for n in re.findall(r"\d+", re.sub(r"\(.*?\)", "", line.group(1)))}) if line else []
        self.link = "[%s](%s)" % (self.name, self.file)


class Readme:
    """A README whose tables stand between <!-- marker --> and <!-- end -->."""

    def __init__(self, *path):
        self.path = os.path.join(ROOT, *path)

    def read_table(self, marker):
        """Rows of a table, by the name of their op; a row is a line of text."""
        text = open(self.path, encoding="utf-8").read()
        inside = re.search(r"<!-- %s -->\n(.*?)<!-- end -->" % marker, text, re.S).group(1)
        rows = {}
        for line in inside.splitlines():
            match = re.match(r"\| \[?(\w+)[\]( ]", line)
            if match and match.group(1) != "file":
                rows.setdefault(match.group(1), []).append(line)
        return rows

    def write_table(self, marker, note, head, rows):
        text = open(self.path, encoding="utf-8").read()
        lines = [note, ""] if note else []
        lines += ["| %s |" % " | ".join(head), "|%s" % (" --- |" * len(head))]
        lines += [line for name in sorted(rows) for line in rows[name]]
        block = "<!-- %s -->\n%s\n<!-- end -->" % (marker, "\n".join(lines))
        text, count = re.subn(r"<!-- %s -->\n.*?<!-- end -->" % marker, lambda m: block, text, flags=re.S)
        assert count == 1, marker
        with open(self.path, "w", encoding="utf-8") as f:
            f.write(text)

    def write_files(self, ops):
        """The table of all files."""
        self.write_table("files", "", ["file", "what it is about", "the trainer runs kernel"],
                         {op.name: [row(op.link, op.about, ", ".join(map(str, op.winners)))] for op in ops})


def row(*cells):
    return "| %s |" % " | ".join(str(c) for c in cells)
