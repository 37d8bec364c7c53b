#!/usr/bin/env python3
"""Rewrites preprocessed CUDA C++ (the output of `g++ -E`) into plain C++ that calls the emulator.
No newline is added or lost, so compiler messages, gdb and every report name the original line.

What is rewritten:
  K<T><<<grid, block, smem, stream>>>(args)   -> ::emu::Launch("K<T>", grid, ...).go([=](auto... a) { K<T>(a...); },
                                                 args)
  __shared__ T a[N];                          -> a reference into the running block's shared memory
  extern __shared__ T a[];                    -> a pointer to the block's dynamic shared memory
  __device__ / __constant__ / __managed__ T v -> the variable in a section of its own, so that the checker knows it
  __global__ ... { body                       -> a function that names itself on entry (launch bounds, attributes)

emu.h defines CUDA's qualifiers as the words __emu_shared__ and so on, which is what we find here.
"""
import re
import sys

OPEN, CLOSE = "([{", ")]}"
TOKEN = re.compile(
    r'"|\'|<<<|\n\#[^\n]*|\b__emu_(?:shared|global|device|constant|managed|launch_bounds)__\b|'
    r'\bextern\s+__emu_shared__\b')
BRACE = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|\n#[^\n]*|[{}]')
ALIGN = re.compile(r"alignas\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)|__attribute__\s*\(\(\s*(?:__)?aligned(?:__)?\s*"
                   r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*\)\)")
SECTIONS = {"device": "emu_device", "constant": "emu_constant", "managed": "emu_managed"}


# Tells the launch which function uses which shared variable: (an address in its code, the variable) in a section.
NOTE_USE = ('asm volatile("777: .pushsection emu_shared_uses,\\"a?\\"; .quad 777b, %%c0; .popsection" '
            ':: "i"(&emu_v_%s));')


class TranslateError(Exception):
    pass


def skip_literal(s, i):
    """s[i] is a quote: the index just after the string or character literal (raw strings too)."""
    quote = s[i]
    if quote == "'" and i > 0 and s[i - 1].isalnum() and not re.search(r"\b(?:u8|u|U|L)$", s[max(0, i - 3):i]):
        return i + 1                                   # the separator of 1'000
    if quote == '"' and re.search(r"(?:\b|u8|u|U|L)R$", s[max(0, i - 3):i]):
        mark = s[i + 1:s.index("(", i)]
        return s.index(")" + mark + '"', i) + len(mark) + 2
    j = i + 1
    while s[j] != quote:
        j += 2 if s[j] == "\\" else 1
    return j + 1


def find(s, i, stops):
    """The first position from i, at nesting depth 0, where one of the strings in `stops` begins."""
    depth = 0
    while i < len(s):
        c = s[i]
        if depth == 0:
            for t in stops:
                if s.startswith(t, i):
                    return i
        if c in "\"'":
            i = skip_literal(s, i)
            continue
        if c in OPEN:
            depth += 1
        elif c in CLOSE:
            depth -= 1
        i += 1
    raise TranslateError("no %s found" % " or ".join(stops))


def name_start(text):
    """Where the kernel's name (with its template arguments) at the end of `text` begins."""
    i = len(text.rstrip())
    if text[i - 1] == ")":                             # (*pointer)<<<...>>> or (expression)<<<...>>>
        depth = 0
        while i > 0:
            i -= 1
            depth += (text[i] == ")") - (text[i] == "(")
            if depth == 0:
                return i
    if text[i - 1] == ">":
        angle = paren = 0
        while i > 0:
            i -= 1
            c = text[i]
            if c in ")]}":
                paren += 1
            elif c in "([{":
                paren -= 1
            elif paren == 0 and c == ">":
                angle += 1
            elif paren == 0 and c == "<":
                angle -= 1
                if angle == 0:
                    break
        i = len(text[:i].rstrip())
    while i > 0 and (text[i - 1].isalnum() or text[i - 1] in "_:" or text[i - 1] == "." or
                     (text[i - 1] == ">" and text[i - 2] == "-") or (text[i - 1] == "-" and text[i] == ">") or
                     (text[i - 1] == "]" and "[" in text[:i])):
        if text[i - 1] == "]":                         # table[i]<<<...>>>
            i = text.rindex("[", 0, i)
        else:
            i -= 1
    return i


def split_declarators(text):
    parts, depth, last = [], 0, 0
    for k, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[last:k])
            last = k + 1
    return parts + [text[last:]]


def without_marks(text):
    """`text` without the preprocessor's line marks, which macros from system headers leave in mid-declaration."""
    return re.sub(r"\n#[^\n]*(?=\n)", "\n", text)


def on_one_line(text, original):
    """`text` without newlines, followed by what brings the line count to where `original` ends."""
    marks = re.findall(r"\n(#[^\n]*)(?=\n)", original)
    text = text.replace("\n", " ")
    if not marks:
        return text + "\n" * original.count("\n")
    after = original[original.rindex("\n" + marks[-1] + "\n") + len(marks[-1]) + 1:]
    return text + "\n" + marks[-1] + "\n" * after.count("\n")


class Translator:
    def __init__(self, source, kernel_attribute="noinline"):
        self.s, self.attribute = source, kernel_attribute
        self.pos = 0                                   # everything before is in self.out
        self.out = []
        self.kind = None                               # of the variable whose first qualifier was read
        self.bounds = None                             # __launch_bounds__ seen before its __global__
        self.kernels = set()                           # every word before a parenthesis in a kernel's header
        for header in re.findall(r"\b__emu_global__\b([^;{]*)", source):
            self.kernels.update(re.findall(r"(\w+)\s*\(", header))
        self.braces, self.scanned = [], 0              # braces open at position `scanned`
        self.globals = {}                              # file-scope shared variables: name -> expression

    def tail(self, n=4000):
        """The last characters of the output, for looking backwards."""
        parts, size = [], 0
        for p in reversed(self.out):
            parts.append(p)
            size += len(p)
            if size > n:
                break
        return "".join(reversed(parts))

    def copy_to(self, i):
        self.out.append(self.s[self.pos:i])
        self.pos = i

    def run(self):
        i, s = 0, self.s
        while True:
            m = TOKEN.search(s, i)
            if not m:
                break
            t, i = m.group(), m.start()
            if t[0] == "\n":
                i = m.end() if m.end() > i + 1 else i + 1
            elif t in "\"'":
                i = skip_literal(s, i)
            elif t == "<<<":
                i = self.launch(i)
            elif t.endswith("__emu_shared__"):
                i = self.shared(i, m.end(), t.startswith("extern"))
            elif t == "__emu_global__":
                i = self.kernel(i, m.end())
            elif t == "__emu_launch_bounds__":
                i = self.early_bounds(i, m.end())
            else:
                i = self.variable(i, m.end(), t[6:-2])
        self.copy_to(len(s))
        text = "".join(self.out)
        for name, expression in self.globals.items():
            text = re.sub(r"(?<![\w.:>])%s\b(?!\s*\()" % name, lambda _: expression, text)
        return text

    def launch(self, i):
        s = self.s
        if re.search(r"(operator|<)\s*$", s[max(0, i - 12):i]):
            return i + 3
        self.copy_to(i)
        tail = self.tail()
        k = name_start(tail)
        name = tail[k:]
        if not name.strip():
            raise TranslateError("a launch without a kernel name")
        self.out = ["".join(self.out)[:-len(name)]]
        close = find(s, i + 3, [">>>"])
        first = s.index("(", close)
        config = s[i + 3:close].replace("__null", "0") + "\n" * s[close:first].count("\n")
        last = find(s, first + 1, [")"])
        args = s[first + 1:last].replace("__null", "nullptr")
        args = re.sub(r"\b__emu_device__\b", "", args)  # of a lambda: [=] __device__ (int i) { ... }
        label = re.sub(r"\s+", "", without_marks(name)).replace("\\", "").replace('"', "")
        capture, callee = "[=]", name
        head = name.split("<")[0]
        variable = "<" not in name and re.sub(r".*:", "", name).strip() not in self.kernels
        if variable or re.search(r"->|[.\[]|^\s*\(\s*\*", head):   # evaluated now, not when the kernel runs
            capture, callee = f"[emu_k = ({name})]", "emu_k"
            if re.fullmatch(r"\w+", label):
                label = self.behind(label, i)
        line = f'::emu::Launch("{label}", {config}).go({capture}(auto... emu_a) {{ {callee}(emu_a...); }}'
        self.out.append(line + (", " + args if args.strip() else "") + ")")
        self.pos = last + 1
        return self.pos

    def behind(self, variable, i):
        """The kernel that `auto variable = kernel<...>;` named last before position i, else the variable's own name."""
        for m in reversed(list(re.finditer(r"\b%s\b(?:\)\s*\([^;{}]*\))?\s*=([^=;{}][^;{}]*);" % variable, self.s[:i]))):
            kernel = re.sub(r"\s+", "", without_marks(m.group(1))).lstrip("&")
            if re.sub(r"<.*", "", kernel).split("::")[-1] in self.kernels:
                return kernel
        return variable

    def kernel(self, i, end):
        """__global__: take the launch bounds out, and let a definition announce itself."""
        s = self.s
        self.copy_to(i)
        stop = find(s, end, ["{", ";"])
        header = s[end:stop]
        m = re.search(r"\b__emu_launch_bounds__\b", header)
        while m:
            first = header.index("(", m.end())
            last = find(header, first + 1, [")"])
            self.bounds = header[first + 1:last]
            header = header[:m.start()] + "\n" * header[m.start():last].count("\n") + header[last + 1:]
            m = re.search(r"\b__emu_launch_bounds__\b", header)
        bound = split_declarators(without_marks(self.bounds))[0].strip().replace("\n", " ") if self.bounds else "0"
        self.bounds = None
        self.out.append(f"__attribute__(({self.attribute})) " + header + s[stop])
        if s[stop] == "{":
            self.out.append(f" static ::emu::Kernel emu_kernel = {{(int)({bound})}}; ::emu::enter(emu_kernel);")
        self.pos = stop + 1
        return self.pos

    def early_bounds(self, i, end):
        self.copy_to(i)
        first = self.s.index("(", end)
        last = find(self.s, first + 1, [")"])
        self.bounds = self.s[first + 1:last].replace("\n", " ")
        self.out.append("\n" * self.s[i:last + 1].count("\n"))
        self.pos = last + 1
        return self.pos

    def variable(self, i, end, kind):
        """__device__ and its like: functions lose the word, variables go to their section."""
        self.copy_to(i)
        self.pos = end
        rest = re.sub(ALIGN, "", self.s[end:end + 3000])
        rest = re.sub(r"__attribute__\s*\(\(.*?\)\)|__emu_launch_bounds__\s*\([^()]*\)|\[\[.*?\]\]", "", rest)
        m = re.search(r"[(;={\[]|\boperator\b|\b__emu_(?:shared|device|constant|managed|global)__\b", rest)
        word = m.group() if m else "("
        is_type = re.match(r"\s*(?:struct|class|union|enum|template|typedef|using)\b", rest)
        if is_type and word in (";", "=", "[", "{"):
            is_type = not self.declares(rest, m.start())
        if word.startswith("__emu_") and kind != "device":  # __managed__ __device__ int x: the second word decides
            self.kind = kind
        elif word[0] in ";=[{" and not is_type and not re.search(r"\bextern\s*$", self.tail(40)):
            declaration = self.tail(60).rsplit(";", 1)[-1].rsplit("}", 1)[-1] + rest[:m.start()]
            if not self.constant(declaration):
                self.out.append(f'__attribute__((section("{SECTIONS[self.kind or kind]}"), used)) ')
            self.kind = None
        return self.pos

    @staticmethod
    def declares(rest, stop):
        """`struct P { int a; } p;` and `struct P p;` are variables, for all their first word."""
        if rest[stop] == "{":
            stop = find(rest, stop + 1, ["}"]) + 1
            return bool(re.match(r"\s*\**\s*\w", rest[stop:]))
        return bool(re.match(r"\s*(?:struct|class|union|enum)\s+[\w:]+(?:\s*<.*>)?[\s*&]+\w+\s*$", rest[:stop], re.S))

    @staticmethod
    def constant(declaration):
        """A const object lies in read-only memory, which cannot share a section with variables: it is not watched."""
        if re.search(r"\bconstexpr\b", declaration):
            return True
        return bool(re.search(r"\bconst\b", declaration.rsplit("*", 1)[-1]))

    def at_file_scope(self, i):
        """Is position i outside of every brace, but for those of namespaces?"""
        for m in BRACE.finditer(self.s, self.scanned, i):
            if m.group() == "{":
                self.braces.append(m.start())
            elif m.group() == "}" and self.braces:
                self.braces.pop()
        self.scanned = i
        return all(re.search(r'(?:\bnamespace\b[\w:\s]*|\bextern\s*"C(?:\+\+)?"\s*)$', self.s[max(0, p - 200):p])
                   for p in self.braces)

    def shared(self, i, end, is_extern):
        s = self.s
        self.copy_to(i)
        tail = self.tail(200)
        file_scope = self.at_file_scope(i)
        m = re.search(r"\b(static|extern)\s+$", tail)
        if m:                                          # `static __shared__`: the storage class goes
            text = "".join(self.out)
            self.out = [text[:len(text) - len(m.group())]]
            is_extern = is_extern or m.group(1) == "extern"
        stop = find(s, end, [";"])
        body = s[end:stop]
        self.out.append(on_one_line(self.declare(without_marks(body), file_scope), s[i:stop]))
        self.pos = stop + 1
        return self.pos

    def declare(self, body, file_scope):
        """One __shared__ declaration, without its keyword and semicolon, as C++."""
        body = re.sub(r"\b(static|extern|__emu_shared__)\b", "", body)
        align = None
        m = ALIGN.search(body)
        if m:
            align = m.group(1) or m.group(2)
            body = body[:m.start()] + body[m.end():]
        base, result = None, ""
        for part in split_declarators(body):
            m = re.match(r"(?s)(.*?)(\w+)\s*((?:\[.*\])?)\s*$", part)
            if not m:
                raise TranslateError("cannot read the declaration __shared__ " + body.strip())
            if base is None:
                base = m.group(1)
                if re.match(r"(?s)\s*(struct|union)\s+\w*\s*\{", base):       # struct { ... } s; names its type first
                    result += f"typedef {base} emu_b_{m.group(2)};"
                    base = f"emu_b_{m.group(2)}"
            name, dims = m.group(2), m.group(3)
            size = f"(size_t)({align})" if align else None
            if re.sub(r"\s", "", dims).startswith("[]"):
                rest = re.sub(r"^\s*\[\s*\]", "", dims)
                elem = f"typedef {base} emu_e_{name} {rest};"
                value = f"(emu_e_{name} *)::emu::dynamic_smem({size or f'alignof(emu_e_{name})'})"
                if file_scope:
                    result += elem
                    self.globals[name] = f"({value})"
                else:
                    result += elem + f"emu_e_{name} *const {name} = {value};"
                continue
            size = size or f"alignof(emu_t_{name})"
            var = f'static ::emu::SharedVar emu_v_{name} = {{"{name}", sizeof(emu_t_{name}), {size}, -1}};'
            value = f"*(emu_t_{name} *)::emu::shared_var(emu_v_{name})"
            result += f"typedef {base} emu_t_{name} {dims};" + var
            if file_scope:
                self.globals[name] = f"({value})"
            else:
                result += f"emu_t_{name} &{name} = {value};{NOTE_USE % name}"
        return result


# A kernel passed as void*: without the cast its parameters are known.
UNTYPED = re.compile(r"\b(cudaLaunch(?:(?:Cooperative)?Kernel\s*\(|KernelExC\s*\([^,;]*,)\s*)"
                     r"(?:\(\s*(?:const\s+)?void\s*\*\s*\)|reinterpret_cast\s*<\s*(?:const\s+)?void\s*\*\s*>)")


def translate(source, kernel_attribute="noinline"):
    source = UNTYPED.sub(r"\1", source)
    t = Translator(source, kernel_attribute)
    try:
        return t.run()
    except (TranslateError, ValueError, IndexError) as e:
        marks = re.findall(r'(?m)^# (\d+) "([^"]*)"', source[:t.pos])
        line = source.rfind("\n# ", 0, t.pos)
        number = source.count("\n", 0, t.pos) + 1
        if marks:
            number = int(marks[-1][0]) + source.count("\n", line + 1, t.pos) - 1
        raise TranslateError("%s:%d: %s" % (marks[-1][1] if marks else "input", number, e))


if __name__ == "__main__":
    try:
        sys.stdout.write(translate(sys.stdin.read()))
    except TranslateError as error:
        sys.exit("translate: error: %s" % error)
