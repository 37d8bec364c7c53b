#!/usr/bin/env python3
"""Children's stories from a small grammar, as training data whose perfect loss is known exactly.

    python3 prepro/stories.py --show 3                                        look at some
    python3 prepro/stories.py --out data/stories --documents 20000 --seed 1   train and val shards, tokenizer, manifest
    python3 prepro/stories.py --floor data/stories                            the loss that no model beats there
    python3 prepro/stories.py --parse samples.txt                             how many sentences are of the grammar?
    python3 prepro/stories.py --questions 100 > questions.jsonl               which sentence comes last? for hellaswag.py

A story is a walk through STORY: at each node one edge is drawn (a sentence and the next node), then the sentence's
slots are filled. A slot is drawn uniformly the first time; after that it is remembered: the hero keeps her name and
gets her pronouns, and what was found in the second sentence comes back later and decides what can be done with it. No
two edges of a node can write the same sentence, so a parser can retrace the walk, and -log p of a story is the sum over
its draws. That is what the floor adds up: see `floor`. Standard library only.
"""

import json
import math
import random
import re
import sys

from shards import ByteTokenizer, EOT, Error, OutputFolder, add_output_options, check_shard_tokens, parser_of, read_split, run_main

# ----------------------------------------------------------------------------
# the grammar

# Short lists, and in most no two words begin alike: a small model that looks back for the word to repeat needs to get
# one letter right. (With 24 names and 12 animals it had not begun to look back after two million tokens.)
GIRLS = "Ada Ella Lily Rosa Wanda Zoe".split()
BOYS = "Ben Finn Hugo Max Otto Tom".split()

# what the hero is, and where such an animal lives
ANIMALS = {
    "bear": "in a mossy cave",
    "duck": "among the reeds",
    "frog": "by a quiet pond",
    "hare": "in a hollow oak",
    "mouse": "under the old mill",
    "goose": "behind the barn",
}

# what is found: (how it helps when somebody is lost, what the lost one does then, where it is kept afterwards)
THINGS = {
    "bell": ("rang the bell", "followed the sound", "hangs by the door"),
    "drum": ("beat the drum", "marched home", "stands in the kitchen"),
    "flute": ("played the flute", "danced home", "sings every Sunday"),
    "kite": ("flew the kite", "saw it from afar", "sways from the ceiling"),
    "lantern": ("lit the lantern", "found the path", "glows in the window"),
    "whistle": ("blew the whistle", "came running", "lies on a soft pillow"),
}

SLOTS = {
    "name": GIRLS + BOYS,
    "animal": list(ANIMALS),
    "friend": "cat lamb pony robin toad wolf".split(),  # other kinds than the hero
    "thing": list(THINGS),
    "trait": "small brave shy merry clever sleepy".split(),
    "colour": "red blue golden silver yellow purple".split(),
    "place": ["under a fern", "by the bridge", "behind a bush", "in tall grass", "on a stone", "by the well"],
    "weather": "windy sunny misty frosty rainy cloudy".split(),
    "trouble": ["thick fog", "deep snow", "wild rain", "the dark"],
    "food": ["warm bread", "plum cake", "mint tea", "pea soup", "honey buns"],
}

# slots that follow from others: what they depend on, and how
DERIVED = {
    "He": ("name", lambda name: "She" if name in GIRLS else "He"),
    "he": ("name", lambda name: "she" if name in GIRLS else "he"),
    "him": ("name", lambda name: "her" if name in GIRLS else "him"),
    "his": ("name", lambda name: "her" if name in GIRLS else "his"),
    "home": ("animal", lambda animal: ANIMALS[animal]),
    "use": ("thing", lambda thing: THINGS[thing][0]),
    "effect": ("thing", lambda thing: THINGS[thing][1]),
    "kept": ("thing", lambda thing: THINGS[thing][2]),
}

# node: its edges, each (weight, sentence, next node). A story ends at END. The longest story has 230 bytes, so that
# with its EOT it fits in a row of 256 tokens.
STORY = {
    "open": [
        (3, "Once there was a {trait} {animal} named {name}.", "find"),
        (2, "A {animal} called {name} lived {home}.", "find"),
        (1, "Have you met {name}, the {trait} {animal}?", "find"),
    ],
    "find": [
        (1, "One {weather} day {he} found a {colour} {thing}.", "plot"),
        (1, "{name} saw a {colour} {thing} {place}.", "plot"),
    ],
    "plot": [
        (1, '"That is my {colour} {thing}!" cried a {friend}.', "give"),
        (1, "Soon a {friend} came, looking for a {colour} {thing}.", "give"),
        (1, "That night a {friend} got lost in {trouble}.", "help"),
        (1, "Nearby a {friend} was lost in {trouble}.", "help"),
        (1, "But at bedtime the {colour} {thing} was gone.", "gone"),
        (1, "But soon {he} lost the {colour} {thing}.", "gone"),
    ],
    "give": [
        (1, "{name} gave the {friend} the {colour} {thing}.", "thanks"),
        (1, "So {name} held out the {colour} {thing}.", "thanks"),
    ],
    "thanks": [
        (1, "The {friend} hugged {him}, and they shared {food}.", "END"),
        (1, '"You are kind, {name}," said the {friend}.', "END"),
    ],
    "help": [
        (1, "{name} {use}, and the {friend} {effect}.", "safe"),
        (1, "So {he} {use}, and the {friend} {effect}.", "safe"),
    ],
    "safe": [
        (1, '"Thank you, {name}!" said the {friend}.', "END"),
        (1, "Now the {colour} {thing} {kept}.", "END"),
    ],
    "gone": [
        (1, "A {friend} found the {colour} {thing} behind {his} bed.", "back"),
        (1, "{He} looked everywhere, and a {friend} helped {him}.", "back"),
    ],
    "back": [
        (1, "Then {name} gave the {friend} some {food}.", "END"),
        (1, "Today the {colour} {thing} {kept}.", "END"),
    ],
}


class Edge:
    """A sentence with slots, as a pattern that recognises it whatever the slots hold."""

    def __init__(self, weight, total, sentence, target, alternatives):
        self.cost = -math.log(weight / total)
        self.weight, self.sentence, self.target = weight, sentence, target
        self.pieces = re.split(r"\{(\w+)\}", sentence)  # text, slot, text, slot, ..., text
        self.slots = list(dict.fromkeys(self.pieces[1::2]))  # each once, in the order of the first use
        pattern, seen = "", set()
        for i, piece in enumerate(self.pieces):
            if i % 2 == 0:
                pattern += re.escape(piece)
            elif piece in seen:
                pattern += f"(?P={piece})"
            else:
                seen.add(piece)
                pattern += f"(?P<{piece}>{'|'.join(map(re.escape, alternatives(piece)))})"
        self.pattern = re.compile(pattern)

    def write(self, values):
        return "".join(p if i % 2 == 0 else values[p] for i, p in enumerate(self.pieces))


class Grammar:
    """The nodes of STORY with their edges; smaller tables make smaller grammars, whose stories a test can list."""

    def __init__(self, slots=SLOTS, story=STORY):
        self.slots = slots
        self.nodes = {}
        for node, edges in story.items():
            total = sum(weight for weight, _, _ in edges)
            self.nodes[node] = [
                Edge(weight, total, sentence, target, self._alternatives) for weight, sentence, target in edges
            ]

    def _alternatives(self, slot):
        """All that a slot could ever hold."""
        if slot in DERIVED:
            source, rule = DERIVED[slot]
            return sorted({rule(value) for value in self.slots[source]})
        return self.slots[slot]

    def derive(self, slot, values):
        """The value that earlier choices give to a slot, None where nothing is decided."""
        if slot in DERIVED:
            source, rule = DERIVED[slot]
            return rule(values[source]) if source in values else None
        return values.get(slot)

    # ---- writing

    def story(self, rng):
        """A random story and its -log p in nats. rng is a random.Random; only random() is used, it never changed."""
        node, values, sentences, cost = "open", {}, [], 0.0
        while node != "END":
            edges = self.nodes[node]
            at = rng.random() * sum(e.weight for e in edges)
            edge = edges[-1]
            for e in edges:
                if at < e.weight:
                    edge = e
                    break
                at -= e.weight
            cost += edge.cost
            filled = dict(values)
            for slot in self._in_order(edge):
                value = self.derive(slot, filled)
                if value is None:
                    options = self.slots[slot]
                    value = options[int(rng.random() * len(options))]
                    values[slot] = value
                    cost += math.log(len(options))
                filled[slot] = value
            sentences.append(edge.write(filled))
            node = edge.target
        return " ".join(sentences), cost

    @staticmethod
    def _in_order(edge):
        """Slots that are drawn before those that follow from them, for a sentence that mentions the latter first."""
        return sorted(edge.slots, key=lambda s: s in DERIVED)

    def expand(self, node, values):
        """All (sentence, probability, values afterwards, next node) at a node: for tests and the curious."""
        total = sum(e.weight for e in self.nodes[node])
        for edge in self.nodes[node]:
            partial = [(edge.weight / total, dict(values))]
            for slot in self._in_order(edge):
                grown = []
                for p, v in partial:
                    options = self.slots[slot] if self.derive(slot, v) is None else [None]
                    grown += [(p / len(options), v if o is None else dict(v, **{slot: o})) for o in options]
                partial = grown
            for p, v in partial:
                yield edge.write({s: self.derive(s, v) for s in edge.slots}), p, v, edge.target

    # ---- reading

    def match(self, edge, sentence, values):
        """(cost, values afterwards) if this edge writes the sentence where `values` are decided, else None."""
        m = edge.pattern.fullmatch(sentence)
        if m is None:
            return None
        cost, after = edge.cost, dict(values)
        for slot in self._in_order(edge):
            decided = self.derive(slot, after)
            if decided is not None:
                if m[slot] != decided:
                    return None
            elif slot not in DERIVED:  # a derived slot whose source is unknown (after a wrong sentence) may be anything
                options = self.slots[slot]
                if m[slot] not in options:
                    return None
                cost += math.log(len(options))
                after[slot] = m[slot]
        return cost, after

    def step(self, nodes, sentence, values):
        """The one edge of these nodes that writes the sentence: (cost, values afterwards, next node), or None."""
        for node in nodes:
            for edge in self.nodes[node]:
                found = self.match(edge, sentence, values)
                if found is not None:
                    return found[0], found[1], edge.target
        return None

    def log_probability(self, story):
        """log p of a whole story, None if the grammar cannot write it."""
        node, values, total = "open", {}, 0.0
        for sentence in split_sentences(story):
            found = self.step([node], sentence, values) if node != "END" else None
            if found is None:
                return None
            cost, values, node = found
            total -= cost
        return total if node == "END" else None

    def check_story(self, story):
        """[(sentence, does it parse)], and whether the story is whole.

        A sentence parses if the grammar can write it there, after the sentences before it: right place in the story,
        right name, pronoun and thing. After a wrong one the reader goes on with whatever the sentence said (if it is of
        the grammar at all), or skips a place; so one mistake costs one sentence.
        """
        nodes, values, results, whole = ["open"], {}, [], True
        for sentence in split_sentences(story):
            found = self.step(nodes, sentence, values)
            results.append((sentence, found is not None))
            if found is None:
                whole = False
                found = self.step(self.nodes, sentence, {})
            if found is not None:
                values = dict(values, **found[1])
                nodes = [found[2]] if found[2] != "END" else []
            else:
                onward = [e.target for node in nodes for e in self.nodes[node] if e.target != "END"]
                nodes = list(dict.fromkeys(nodes + onward))
        return results, whole and nodes == []


def split_sentences(story):
    """Cuts after . ! ? (and a closing quote) where a space and a capital letter or a quote follow."""
    return re.split(r"(?<=[.!?]) (?=[A-Z\"])|(?<=[.!?]\") (?=[A-Z\"])", story)


def is_cut(sentence):
    """Does it lack an end, as the last sentence of a text cut by a length limit does?"""
    return re.search(r"[.!?]\"?$", sentence) is None


# ----------------------------------------------------------------------------
# the commands


def split_seed(seed, split):
    return random.Random(f"{seed} {split}")  # strings are seeded through SHA-512, the same everywhere


def write_shards(args):
    """Train and val stories from two streams of one seed, so that more of one does not change the other."""
    if args.documents < 1:
        raise Error(f"--documents {args.documents} is not at least 1")
    val_documents = args.val_documents if args.val_documents is not None else max(1, args.documents // 50)
    if val_documents < 1:
        raise Error(f"--val-documents {val_documents} is not at least 1")
    check_shard_tokens(args.shard_tokens)
    grammar, tokenizer = Grammar(), ByteTokenizer()
    nats, bytes_written = {}, {}
    with OutputFolder(args.out, args.overwrite) as out:
        for split, count in (("train", args.documents), ("val", val_documents)):
            rng, writer = split_seed(args.seed, split), out.split(split, tokenizer, args.shard_tokens)
            total = 0.0
            for _ in range(count):
                story, cost = grammar.story(rng)
                writer.begin_document()
                writer.text(story.encode())
                total += cost
            nats[split], bytes_written[split] = total, writer.tokens - count
        targets = out.splits[1].tokens - 1
        out.finish(
            tokenizer,
            {
                "source": "stories",
                "seed": args.seed,
                "val_nats": nats["val"],
                "val_targets": targets,
                "floor_nats_per_token": nats["val"] / targets,
                "bytes_per_document": bytes_written["train"] / args.documents,
            },
        )
    print(
        f"{args.out}: {args.documents} stories to train on ({bytes_written['train'] / 1e6:.2f} MB, "
        f"{bytes_written['train'] / args.documents:.0f} bytes each), {val_documents} to validate; "
        f"floor {nats['val'] / targets:.4f} nats/token"
    )
    return 0


def floor(args):
    """Prints the validation loss of a model that knows the grammar and sees each story from its beginning.

    Numerator: sum over the val stories of -log p(story), in nats. The token that ends a story, the next one's EOT, adds
    nothing: after the last sentence it is certain. Denominator: the targets of the packed stream, that is all its
    tokens (each story's EOT and its bytes) except the first, which no token predicts. A model that sees every story
    from its beginning cannot do better on average. Rows of T tokens cut a story at their edges, whose rest has then
    lost its beginning: that costs a real model some hundredths more, the fewer the longer the rows are.
    """
    grammar, nats, tokens, count = Grammar(), 0.0, 0, 0
    for document in read_split(args.floor, "val"):
        log_p = grammar.log_probability(document.decode(errors="replace"))
        if log_p is None:
            raise Error(f"document {count} of the val shards in {args.floor} is not a story of this grammar")
        nats, tokens, count = nats - log_p, tokens + 1 + len(document), count + 1
    print(f"floor {nats / (tokens - 1):.6f} nats/token ({nats:.3f} nats in {count} stories, {tokens - 1} targets)")
    return 0


def split_stories(text):
    pieces = [p.strip("\n") for p in re.split(re.escape(EOT) + r"|\n[ \t]*\n", text.replace("\r\n", "\n"))]
    return [p.strip() for p in pieces if p.strip()]


def parse(args):
    """Prints what does not parse, then `N of M sentences parse`; exit code 0 if the share is at least --min-share."""
    if args.sentences is not None and args.sentences < 1:
        raise Error(f"--sentences {args.sentences} is not at least 1")
    if args.parse == "-":
        data = sys.stdin.buffer.read()
    else:
        with open(args.parse, "rb") as f:
            data = f.read()
    grammar = Grammar()
    sentences = good = read = whole = dropped = 0
    for story in split_stories(data.decode(errors="replace")):
        results, story_is_whole = grammar.check_story(story)
        if args.drop_cut and is_cut(results[-1][0]):
            results, dropped = results[:-1], dropped + 1
        if args.sentences is not None:
            results = results[: args.sentences - sentences]
            if not results:
                break
        read, whole = read + 1, whole + story_is_whole
        sentences, good = sentences + len(results), good + sum(ok for _, ok in results)
        if not args.quiet:
            for sentence, ok in results:
                if not ok:
                    print(f"no: {'(cut) ' if is_cut(sentence) else ''}{sentence!r}")
    if sentences == 0:
        raise Error(f"no sentence in {'standard input' if args.parse == '-' else args.parse}")
    left_out = f", {dropped} cut sentences left out" if dropped else ""
    print(f"{whole} of {read} stories are whole{left_out}")
    print(f"{good} of {sentences} sentences parse")
    return 0 if good >= args.min_share * sentences else 1


def question(grammar, rng):
    """A story without its last sentence, and four to choose from: only one of them can the grammar write there."""
    *context, right = split_sentences(grammar.story(rng)[0])
    endings = [right]
    while len(endings) < 4:
        ending = split_sentences(grammar.story(rng)[0])[-1]
        if ending not in endings and grammar.log_probability(" ".join([*context, ending])) is None:
            endings.append(ending)
    label = int(rng.random() * 4)
    endings[0], endings[label] = endings[label], endings[0]
    return {"ctx": " ".join(context), "endings": endings, "label": label}


def questions(args):
    """Prints multiple-choice questions in HellaSwag's format, a JSON object a line."""
    rng, grammar = split_seed(args.seed, "questions"), Grammar()
    for _ in range(args.questions):
        print(json.dumps(question(grammar, rng)))
    return 0


def show(args):
    rng, grammar = split_seed(args.seed, "show"), Grammar()
    print("\n\n".join(grammar.story(rng)[0] for _ in range(args.show)))
    return 0


def main():
    parser = parser_of(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", metavar="DIR", help="write shards, tokenizer files and manifest.json to this folder")
    what.add_argument(
        "--parse",
        metavar="FILE",
        help="count sentences of the grammar in a text (- is standard input); "
        "stories end at <|endoftext|> or an empty line",
    )
    what.add_argument("--floor", metavar="DIR", help="work out the floor of the val shards in a folder")
    what.add_argument("--questions", type=int, metavar="N", help="print N multiple-choice questions (for hellaswag.py)")
    what.add_argument("--show", type=int, metavar="N", help="print N stories")
    parser.add_argument("--documents", type=int, default=20000, metavar="N", help="stories to train on (default 20000)")
    parser.add_argument("--val-documents", type=int, metavar="N", help="stories to validate on (default a fiftieth)")
    parser.add_argument("--seed", type=int, default=1, help="(default 1)")
    add_output_options(parser)
    parser.add_argument(
        "--drop-cut",
        action="store_true",
        help="with --parse: leave out a story's last sentence if it has " "no end, cut by a length limit",
    )
    parser.add_argument(
        "--min-share",
        type=float,
        default=1.0,
        metavar="X",
        help="with --parse: the exit code is 0 if " "at least this share of the sentences parses (default 1)",
    )
    parser.add_argument("--sentences", type=int, metavar="N", help="with --parse: stop after N sentences")
    parser.add_argument("--quiet", action="store_true", help="with --parse: do not list what does not parse")
    args = parser.parse_args()
    if args.out:
        return write_shards(args)
    if args.parse:
        return parse(args)
    if args.questions is not None:
        return questions(args)
    return floor(args) if args.floor else show(args)


if __name__ == "__main__":
    run_main(main)
