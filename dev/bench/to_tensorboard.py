#!/usr/bin/env python3
"""Writes the metrics.jsonl of one or several runs as TensorBoard's event files.

    pip install tensorboard
    python3 dev/bench/to_tensorboard.py out/metrics.jsonl --out tb             a folder a run: tb/out
    python3 dev/bench/to_tensorboard.py out/metrics.jsonl --out tb --follow    and goes on while the job runs, until Ctrl-C
    tensorboard --logdir tb

The horizontal axis is the step, or with --x tokens the number of tokens. Events of an earlier call in the same folder are
replaced. Times of day are reckoned back from the file's last change, since the metrics hold durations only.
"""

import argparse
import glob
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import live

# field of metrics.jsonl -> name in TensorBoard, which groups by what stands before the slash
SCALARS = {"loss": "loss/train", "ce_loss": "loss/cross_entropy", "aux_loss": "loss/balance", "val_loss": "loss/validation",
           "grad_norm": "optimizer/grad_norm", "lr": "optimizer/lr", "tokens_per_s": "speed/tokens_per_s", "step_ms": "speed/step_ms",
           "mfu": "speed/mfu", "gemm_share": "speed/gemm_share", "mem": "memory/bytes", "tokens": "progress/tokens"}
LAYERS = {"expert_load": "expert_load", "router_entropy": "router_entropy", "dead_experts": "dead_experts"}


def fail(message):
    print(f"to_tensorboard.py: error: {message}", file=sys.stderr)
    sys.exit(1)


def scalars_of(row):
    """(name, value) of everything a line of metrics.jsonl holds; what is null there is left out."""
    for field, name in SCALARS.items():
        if live.is_number(row.get(field)):
            yield name, row[field]
    for phase, ms in (row.get("phases") or {}).items():
        if live.is_number(ms):
            yield f"phase_ms/{phase}", ms
    for field, name in LAYERS.items():
        values = row.get(field) or []
        digits = len(str(len(values) - 1))
        for layer, value in enumerate(values):
            if live.is_number(value):
                yield f"{name}/layer_{layer:0{digits}d}", value
        numbers = [v for v in values if live.is_number(v)]
        if numbers:
            yield f"{name}/{'all' if field == 'dead_experts' else 'mean'}", sum(numbers) / (1 if field == "dead_experts" else len(numbers))


def duration(row):
    """Seconds that a step took, validation and checkpoints included."""
    phases = [ms for ms in (row.get("phases") or {}).values() if live.is_number(ms)]
    return (sum(phases) if phases else row.get("step_ms") or 0.0) / 1e3


class Writer:
    """One run's folder. A run that was resumed has cut lines: its events are written anew."""

    def __init__(self, tail, folder, axis):
        self.tail, self.folder, self.axis, self.file, self.written, self.last = tail, folder, axis, None, 0, None

    def open(self):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        if self.file:
            self.file.close()
        for old in glob.glob(os.path.join(glob.escape(self.folder), "events.out.tfevents.*")):
            os.remove(old)
        self.file, self.written = EventFileWriter(self.folder), 0

    def update(self):
        """Writes the lines that are new; returns how many."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        self.tail.read()
        rows = self.tail.rows
        if self.file is None or self.written > len(rows) or (self.written and rows[self.written - 1] is not self.last):
            self.open()
        new = rows[self.written:]
        at = os.stat(self.tail.path).st_mtime - sum(duration(row) for row in new)
        for row in new:
            at += duration(row)
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars_of(row)]
            self.file.add_event(Event(step=row[self.axis], wall_time=at, summary=Summary(value=values)))
        if new:
            self.last = rows[-1]
        self.written = len(rows)
        self.file.flush()
        return len(new)


def run_names(paths):
    """A short name a run: its folder's, or the file's where the folder says nothing."""
    names = [os.path.basename(os.path.dirname(os.path.abspath(p))) if os.path.basename(p) == "metrics.jsonl"
             else os.path.splitext(os.path.basename(p))[0] for p in paths]
    return [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("metrics", nargs="+", help="metrics.jsonl of a run")
    parser.add_argument("--out", default="tb", metavar="DIR", help="TensorBoard's --logdir [tb]")
    parser.add_argument("--x", default="step", choices=["step", "tokens"], help="the horizontal axis [step]")
    parser.add_argument("--follow", action="store_true", help="go on while the job runs, until Ctrl-C")
    parser.add_argument("--every", type=float, default=5, metavar="SECONDS", help="between two looks, with --follow [5]")
    args = parser.parse_args()
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        fail("needs the tensorboard package: pip install tensorboard")
    writers = [Writer(live.Tail(path), os.path.join(args.out, name), args.x) for path, name in zip(args.metrics, run_names(args.metrics))]
    try:
        while True:
            for writer in writers:
                try:
                    count = writer.update()
                except FileNotFoundError:
                    if not args.follow: # else the run has not begun yet
                        fail(f"cannot read {writer.tail.path}: No such file or directory")
                    continue
                if count or not args.follow:
                    print(f"{writer.folder}: {count} steps", flush=True)
            if not args.follow:
                break
            time.sleep(max(0.05, args.every))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        fail(f"cannot write into {args.out}: {error.strerror or error}")
    except ValueError as error:
        fail(error)
    for writer in writers:
        if writer.file:
            writer.file.close()


if __name__ == "__main__":
    main()
