#!/usr/bin/env python3
"""translate.py: translates the kernels of a PTX file into C++ over dev/emulator.

Usage: dev/emulator/ptx/translate.py FILE.ptx HOST_SYMBOLS DIRECTORY PARTS

HOST_SYMBOLS is the output of nm for the object of the emulated program. Writes DIRECTORY/part_0.cpp, ... (PARTS files
of about equal length) and DIRECTORY/symbols, the host's functions that objcopy has to make visible to them. Each entry
becomes a function that runs one thread; registers become variables, labels remain labels. An instruction that forms.py
does not have, or whose operands have other types, is an error that names the kernel and the line.
"""

import bisect
import math
import os
import re
import sys

from forms import TYPES, all_forms

FORMS = all_forms()
REGISTER_LETTERS = {"b16": "h", "b32": "r", "b64": "l", "f32": "f", "f64": "d", "pred": "p"}
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
SPECIAL = {
    f"%{name}.{axis}": f"position.{member}.{axis}"
    for name, member in (("tid", "thread"), ("ctaid", "block"), ("ntid", "block_size"), ("nctaid", "grid_size"))
    for axis in "xyz"
}
ASYNCHRONOUS = ("mbarrier.", "cp.async.bulk.", "wgmma.")
SHARED_GAP = 64  # bytes that no access may touch, before and between shared arrays


class Failure(Exception):
    pass


class Kernel:
    def __init__(self, name):
        self.name = name
        self.parameters = {}  # name: (offset, bytes)
        self.parameter_bytes = 0
        self.most_threads = 1024
        self.registers_known = False  # at the launch
        self.registers = []  # (prefix, letter, count)
        self.items = []  # ("label", name), ("open",), ("close",), ("register", name, letter), ("instruction", ...)
        self.shared = {}  # arrays that the kernel declares, name: (alignment, bytes)
        self.local = None  # name, alignment, bytes


class Instruction:
    def __init__(self, guard, opcode, operands, line, place):
        self.guard, self.opcode, self.operands, self.line, self.place = guard, opcode, operands, line, place


# ----------------------------------------------------------------------------------------------------------------------
# parsing

TOKENS = re.compile(
    r"""\s*(?:
    (?P<line>\.(?:version|target|address_size|file|loc|maxntid|minnctapersm|maxnreg)\b[^\n]*)\n
  | \.section\b[^{]*\{[^}]*\}
  | \.pragma\s+"(?:nounroll|used_bytes_mask\s\w+)"\s*;
  | (?P<array>(?:\.extern\s+)?\.(?:shared|local)\b[^;]*);
  | \.(?:visible\s+|weak\s+)?entry\s+(?P<entry>\w+)\s*\((?P<parameters>[^)]*)\)
  | \.reg\b(?P<register>[^;]*);
  | (?P<label>[$\w]+):
  | (?P<brace>[{}])
  | (?P<instruction>[@a-z][^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);
  | (?P<end>\Z)
  )""",
    re.VERBOSE,
)
ARRAY = re.compile(r"(\.extern)?\s*\.(shared|local)\s+\.align\s+(\d+)\s+\.[busf](\d+)\s+([\w$]+)(?:\[(\d*)\])?")
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)(?:\s+\.ptr\s+\.align\s+\d+)?\s+(\w+)(?:\[(\d+)\])?"
)
INSTRUCTION = re.compile(r"(?:@(!?)%?(\w+)\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)*)(?:\s+(.*))?", re.DOTALL)
REGISTERS = re.compile(r"\s*\.(\w+)\s+%?(\w+)(?:<(\d+)>)?\s*")
LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+")


class Parser:
    """The kernels, the shared arrays outside of them, and the names of the source files of a PTX file."""

    def __init__(self, text):
        self.text = re.sub(r"//[^\n]*", "", text)
        self.ends = [m.start() for m in re.finditer("\n", self.text)]
        self.kernels, self.shared, self.files = [], {}, {}
        self.architecture = "0"
        kernel, depth, place = None, 0, ("0", "0")
        at = 0
        while at < len(self.text):
            token = TOKENS.match(self.text, at)
            line = bisect.bisect_left(self.ends, at + len(re.match(r"\s*", self.text[at : at + 1000])[0])) + 1
            if not token:
                raise Failure(f"line {line}: not understood: {self.text[at : at + 80].strip().splitlines()[0]}")
            at = token.end()
            kind = token.lastgroup
            if kind == "line":
                place = self.directive(token["line"], kernel, place, line)
            elif kind == "array":
                self.array(token["array"], kernel if depth else None, line)
            elif kind == "parameters":
                kernel, depth, place = Kernel(token["entry"]), 0, ("0", "0")
                self.read_parameters(kernel, token["parameters"], line)
                self.kernels.append(kernel)
            elif kind in ("register", "label", "instruction") and not depth:
                raise Failure(f"line {line}: {token[0].strip()} outside of a kernel")
            elif kind == "register":
                self.register(token["register"], kernel, depth, line)
            elif kind == "label":
                kernel.items.append(("label", token["label"]))
            elif kind == "brace":
                depth += 1 if token["brace"] == "{" else -1
                if kernel is None or depth < 0:
                    raise Failure(f"line {line}: a brace outside of a kernel")
                if depth == 0:
                    kernel = None
                elif (token["brace"], depth) != ("{", 1):
                    kernel.items.append(("open" if token["brace"] == "{" else "close",))
            elif kind == "instruction":
                kernel.items.append(("instruction", self.instruction(token["instruction"], line, place)))

    def directive(self, text, kernel, place, line):
        words = text.split()
        if words[0] == ".loc":
            found = LOC.match(text)
            return place if found[2] == "0" else (found[1], found[2])  # line 0: no line of the source
        if words[0] == ".file":
            self.files[words[1]] = text.split('"')[1]
        elif words[0] == ".maxntid":
            kernel.most_threads = math.prod(int(number) for number in text.replace(".maxntid", "").split(","))
        elif words[0] in (".minnctapersm", ".maxnreg"):
            kernel.registers_known = True
        elif words[0] == ".target":
            self.architecture = re.fullmatch(r"sm_(\d+[af]?)", words[1])[1]
        elif words[0] == ".address_size" and words[1] != "64":
            raise Failure(f"line {line}: addresses of {words[1]} bits")
        return place

    def array(self, text, kernel, line):
        found = ARRAY.fullmatch(text.strip())
        if not found or bool(found[1]) != (found[6] == "") or (found[2] == "local" and (not kernel or kernel.local)):
            raise Failure(f"line {line}: not understood: {text}")
        name, alignment = found[5], int(found[3])
        count = SIZES[found[4]] * (1 if found[6] is None else int(found[6] or 0))
        if found[2] == "local":
            kernel.local = (name, alignment, count)
        else:
            (kernel.shared if kernel else self.shared)[name] = (alignment, count)

    def read_parameters(self, kernel, text, line):
        for parameter in filter(None, (part.strip() for part in text.split(","))):
            found = PARAMETER.fullmatch(parameter)
            if not found:
                raise Failure(f"line {line}: not understood: {parameter}")
            size = SIZES[found[2]]
            alignment, count = int(found[1] or size), size * int(found[4] or 1)
            offset = (kernel.parameter_bytes + alignment - 1) // alignment * alignment
            kernel.parameters[found[3]] = (offset, count)
            kernel.parameter_bytes = offset + count

    def register(self, text, kernel, depth, line):
        found = REGISTERS.fullmatch(text)
        if not found or found[1] not in REGISTER_LETTERS:
            raise Failure(f"line {line}: not understood: .reg{text}")
        letter = REGISTER_LETTERS[found[1]]
        # for sm_100 and later, nvcc declares registers by size, and names those of floating-point numbers so
        letter = {("f", "r"): "f", ("fd", "l"): "d"}.get((found[2], letter), letter)
        if depth > 1:
            kernel.items.append(("register", found[2], letter))
        else:
            kernel.registers.append((found[2], letter, int(found[3]) if found[3] else None))

    def instruction(self, text, line, place):
        found = INSTRUCTION.fullmatch(text.strip())
        if not found:
            raise Failure(f"line {line}: not understood: {text}")
        operands = re.findall(r"\s*(\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+)\s*(?:,|\Z)", found[4] or "")
        guard = f"{found[1]}{found[2]}" if found[2] else ""
        return Instruction(guard, found[3], [operand.strip() for operand in operands], line, place)


# ----------------------------------------------------------------------------------------------------------------------
# C++

HEAD = "// written by dev/emulator/ptx/translate.py\n#include <emulator/ptx/hopper.h>\nusing namespace ptx;\n"


def is_wgmma(instruction):
    return instruction.opcode.startswith("wgmma.mma_async")


class Writer:
    """The function of a kernel."""

    def __init__(self, kernel, number, parser):
        self.kernel, self.number, self.parser = kernel, number, parser
        self.letters = {}  # of single registers
        self.prefixes = {}  # of numbered registers: letter, count
        for name, letter, count in kernel.registers:
            if count is None:
                self.letters[name] = letter
            else:
                self.prefixes[name] = (letter, count)
        self.used = {}  # registers: letter, of those that occur
        self.sites, self.lines = [], []
        self.labels = {item[1] for item in kernel.items if item[0] == "label"}
        self.shared = {}  # name: (offset, bytes, alignment)
        self.shared_end = SHARED_GAP
        self.dynamic = None  # name of the array of the launch's size
        opcodes = [item[1] for item in kernel.items if item[0] == "instruction"]
        self.asynchronous = any(i.opcode.startswith(ASYNCHRONOUS) for i in opcodes)
        self.of_wgmma = {name for i in opcodes for name in self.registers_of(i) if is_wgmma(i)}

    def fail(self, instruction, what):
        raise Failure(
            f"kernel {self.kernel.name}, line {instruction.line}: {what}: "
            f"{instruction.opcode} {', '.join(instruction.operands)}"
        )

    def register(self, name):
        """The letter of a register, or None."""
        if name in self.letters:
            return self.letters[name]
        found = re.fullmatch(r"([a-zA-Z]+)(\d+)", name)
        letter, count = self.prefixes.get(found[1], (None, 0)) if found else (None, 0)
        if letter is None or int(found[2]) >= count:
            return None
        self.used[name] = letter
        return letter

    def registers_of(self, instruction):
        """Names in the operands, registers among them; of wgmma: those of its matrices."""
        operands = [text for text in instruction.operands if text[0] == "{" or not is_wgmma(instruction)]
        return re.findall(r"\w+", " ".join(operands))

    def shared_offset(self, name):
        """Of a shared array in the shared memory of the block. It has the alignment of its type and no more."""
        if name not in self.shared:
            alignment, count = self.kernel.shared.get(name) or self.parser.shared[name]
            if count == 0:
                self.dynamic = name
                self.shared[name] = (None, 0, alignment)
            else:
                offset = (self.shared_end + 2 * alignment - 1) // (2 * alignment) * 2 * alignment
                if alignment < 16:
                    offset += alignment
                self.shared[name] = (offset, count, alignment)
                self.shared_end = offset + count + SHARED_GAP
        return self.shared[name][0]

    def symbol(self, name, space):
        """The address of a symbol as C++, or None if there is no such symbol in this space."""
        if space == "param" and name in self.kernel.parameters:
            return f"(u64)(uintptr_t)(parameters.begin + {self.kernel.parameters[name][0]})"
        if space == "local" and self.kernel.local and name == self.kernel.local[0]:
            return "(u64)(uintptr_t)depot.begin"
        if space == "shared" and (name in self.kernel.shared or name in self.parser.shared):
            offset = self.shared_offset(name)
            return "dynamic_offset" if offset is None else f"{offset}u"
        return None

    def address(self, text, space):
        found = re.fullmatch(r"\[\s*(%?)([\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if not found:
            return None
        wanted, suffix, bits = ("r", "u", 32) if space == "shared" else ("l", "ull", 64)
        if found[1]:
            base = found[2] if self.register(found[2]) == wanted else None
        else:
            base = self.symbol(found[2], space)
            if base and space == "param":  # known now
                offset, count = self.kernel.parameters[found[2]]
                if not 0 <= int(found[3] or 0) < count:
                    return None
        if base and found[3]:
            base += f" + {int(found[3]) % (1 << bits)}{suffix}"
        return base

    def immediate(self, text, letter):
        if letter in "fd":
            found = re.fullmatch(r"0f([0-9A-F]{8})" if letter == "f" else r"0d([0-9A-F]{16})", text)
            suffix = "u" if letter == "f" else "ull"
            return f"same_bits<{TYPES[letter]}>(0x{found[1]}{suffix})" if found else None
        if not re.fullmatch(r"-?(0|[1-9]\d*|0x[0-9a-fA-F]+)", text):
            return None
        value, bits = int(text, 0), {"h": 16, "r": 32, "l": 64, "p": 1, "n": 31}[letter]
        if not -(1 << (bits - 1)) <= value < 1 << bits:
            return None
        if letter == "n":
            return str(value)
        value %= 1 << bits
        return {"h": f"(u16){value}", "r": f"{value}u", "l": f"{value}ull", "p": "true" if value else "false"}[letter]

    def source(self, text, letter, spaces):
        """An operand as C++, or None if it is not of this kind. `spaces` has the state spaces of the addresses left."""
        if letter == "@":
            return self.address(text, spaces.pop(0)) if spaces else None
        if letter == "&":
            return next(filter(None, (self.symbol(text, space) for space in spaces)), None)
        if letter == "s":
            return SPECIAL.get(text)
        if letter == "L":
            return text.replace("$", "") if text in self.labels else None
        if letter in "FR":  # registers of wgmma
            names = self.destinations(text, f"[{letter.lower() * (text.count(',') + 1)}]")
            return f"{{&{', &'.join(names)}}}" if names and None not in names else None
        if letter == "T":
            found = re.fullmatch(r"\[\s*%(\w+)\s*,\s*\{([^}]*)\}\s*\]", text)
            parts = [self.source(part.strip(), "r", []) for part in found[2].split(",")] if found and spaces else [None]
            if None in parts or self.register(found[1]) != "l":
                return None
            spaces.pop(0)
            return f"Tile{{{found[1]}, {{{', '.join(parts)}}}}}"
        if letter[0] == "[":
            parts = [part.strip() for part in text[1:-1].split(",")] if text[0] == "{" else []
            values = [self.source(part, of, []) for part, of in zip(parts, letter[1:-1])]
            if len(parts) != len(letter) - 2 or None in values:
                return None
            return f"V<{TYPES[letter[1]]}, {len(values)}>{{{{{', '.join(values)}}}}}"
        if text.startswith("%") or text in self.letters:
            return text.lstrip("%") if self.register(text.lstrip("%")) == letter else None
        return self.immediate(text, letter)

    def destinations(self, text, letter):
        """The registers that a destination names (None for `_`), or None if it is not of this kind."""
        if letter == "[rp]":
            parts = text.split("|")
        elif letter[0] == "[":
            parts = [part.strip() for part in text[1:-1].split(",")] if text[0] == "{" else []
        else:
            parts = [text]
        letters = letter.strip("[]")
        if len(parts) != len(letters):
            return None
        names = []
        for part, of in zip(parts, letters):
            name = part.lstrip("%")
            if part != "_" and ((part[0] != "%" and name not in self.letters) or self.register(name) != of):
                return None
            names.append(None if part == "_" else name)
        return names

    def statement(self, instruction):
        opcode = re.sub(r"::(cta|cluster)\b", "", instruction.opcode)
        rows = FORMS.get(opcode) or self.fail(instruction, "unknown form")
        parts = opcode.replace("mbarrier::complete_tx::bytes", "shared").split(".")
        named = [part for part in parts if part in ("global", "shared", "local", "param")]
        for destinations, sources, expression in rows:
            operands = instruction.operands
            if len(operands) != len(destinations) + len(sources):
                continue
            targets = [self.destinations(text, letter) for text, letter in zip(operands, destinations)]
            # mov takes the address of a shared array as 32 bits, of the others as 64
            spaces = list(named)
            if "&" in sources:
                spaces = ["shared"] if destinations == ["r"] else ["local", "param"]
            values = [self.source(text, letter, spaces) for text, letter in zip(operands[len(destinations) :], sources)]
            if None not in targets and None not in values:
                return self.assignment(targets, values, expression, instruction)
        return self.fail(instruction, "operands of other types than the form has")

    def assignment(self, targets, values, expression, instruction):
        names = dict(zip("abcdefgh", values))
        if re.search(r"\bS\b", expression):
            names["S"] = self.site(instruction)
        text = re.sub(r"\b[a-hS]\b", lambda m: names[m[0]], expression)
        if not targets or targets[0] == [None]:
            return text + ";"
        if len(targets[0]) == 1:
            return f"{targets[0][0]} = {text};"
        parts = "".join(f" {name} = v.v[{i}];" for i, name in enumerate(targets[0]) if name)
        return f"{{ const auto v = {text};{parts} }}"

    def site(self, instruction):
        self.sites.append((*instruction.place, instruction.line))
        return f"sites_{self.number}[{len(self.sites) - 1}]"

    def write_body(self):
        for item in self.kernel.items:
            if item[0] == "label":
                self.lines.append(f"{item[1].replace('$', '')}:;")
            elif item[0] in ("open", "close"):
                self.lines.append("{" if item[0] == "open" else "}")
            elif item[0] == "register":
                self.letters[item[1]] = item[2]
                self.lines.append(f"{TYPES[item[2]]} {item[1]};")
            else:
                instruction = item[1]
                text = self.statement(instruction)
                if instruction.opcode.startswith("setmaxnreg") and not self.kernel.registers_known:
                    self.fail(instruction, "ptxas ignores it without .minnctapersm or .maxnreg")
                touched = sorted(self.of_wgmma & set(self.registers_of(instruction)))
                if touched and not is_wgmma(instruction):
                    text = f"{{ touched({{&{', &'.join(touched)}}}, {self.site(instruction)}); {text} }}"
                if instruction.guard:
                    inverted, register = instruction.guard[0] == "!", instruction.guard.lstrip("!")
                    if self.register(register) != "p":
                        self.fail(instruction, f"the guard %{register} is no predicate")
                    text = f"if ({'!' if inverted else ''}{register}) {text}"
                self.lines.append(text)

    def write(self):
        self.write_body()
        of = self.number
        out = [f"\n// {self.kernel.name}"]
        if self.sites:
            rows = ", ".join(f"{{files[{file}], {line}, {ptx}}}" for file, line, ptx in self.sites)
            out.append(f"static const Site sites_{of}[] = {{{rows}}};")
        out.append(f"static void run_{of}([[maybe_unused]] const Range parameters) {{")
        registers = {}
        for name, letter in [*self.used.items(), *((n, c) for n, c, count in self.kernel.registers if count is None)]:
            registers.setdefault(letter, []).append(name)
        out += [f"{TYPES[letter]} {', '.join(names)};" for letter, names in registers.items()]
        if self.kernel.local:
            _, alignment, count = self.kernel.local
            out.append(f"alignas({alignment}) char depot_bytes[{count}];")
            out.append("const Range depot = {depot_bytes, depot_bytes + sizeof(depot_bytes)};")
        out += [*self.lines, "}"]
        arrays = [f"{{{offset}, {count}}}" for offset, count, _ in self.shared.values() if offset is not None]
        if arrays:
            out.append(f"static const SharedArray shared_{of}[] = {{{', '.join(arrays)}}};")
        return "\n".join(out)

    def row(self, host):
        shared = sum(offset is not None for offset, _, _ in self.shared.values())
        return (
            f'{{"{self.kernel.name}", (const void *)&{host}, run_{self.number}, {self.kernel.parameter_bytes}, '
            f"{self.kernel.most_threads}, {f'shared_{self.number}' if shared else 'nullptr'}, {shared}, "
            f"{str(bool(self.dynamic)).lower()}, {str(self.asynchronous).lower()}}}"
        )


def host_names(kernels, symbols):
    """The function of the emulated program that each kernel was compiled from: static functions have an L. Kernels that
    the program never launches have none, and no translation."""
    names = {kernel.name: {kernel.name, "_ZL" + kernel.name[2:]} & symbols for kernel in kernels}
    return {name: found.pop() for name, found in names.items() if found}


def write_part(path, writers, texts, hosts, parser):
    repository = os.getcwd() + os.sep
    names = {number: os.path.normpath(name).removeprefix(repository) for number, name in parser.files.items()}
    top = max([0, *map(int, names), *(int(site[0]) for writer in writers for site in writer.sites)])
    with open(path, "w", encoding="utf-8") as out:
        out.write(HEAD)
        rows = ", ".join('"' + names.get(str(i), "?") + '"' for i in range(top + 1))
        out.write(f"[[maybe_unused]] static const char *const files[] = {{{rows}}};\n")
        for writer in writers:
            out.write(f'extern "C" void {hosts[writer.kernel.name]}();\n')
        out.writelines(text + "\n" for text in texts)
        rows = ",\n    ".join(writer.row(hosts[writer.kernel.name]) for writer in writers)
        out.write(f"\nstatic const Kernel kernels[] = {{\n    {rows}}};\n")
        count = "sizeof(kernels) / sizeof(kernels[0])"
        out.write(f'static const AddKernels added("{parser.architecture}", kernels, {count});\n')


def main():
    ptx, symbols, directory, parts = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    with open(ptx, encoding="utf-8") as file:
        parser = Parser(file.read())
    with open(symbols, encoding="utf-8") as file:
        hosts = host_names(parser.kernels, {line.split()[-1] for line in file if line.strip()})
    kernels = [kernel for kernel in parser.kernels if kernel.name in hosts]
    writers = [Writer(kernel, number, parser) for number, kernel in enumerate(kernels)]
    shares = [[] for _ in range(parts)]  # the longest first, each to the shortest part
    for writer in sorted(writers, key=lambda w: len(w.kernel.items), reverse=True):
        min(shares, key=lambda share: sum(len(w.kernel.items) for w in share)).append(writer)
    texts = [[writer.write() for writer in share] for share in shares]  # before any file: a failure writes none
    os.makedirs(directory, exist_ok=True)
    for i, share in enumerate(shares):
        write_part(os.path.join(directory, f"part_{i}.cpp"), share, texts[i], hosts, parser)
    with open(os.path.join(directory, "symbols"), "w", encoding="utf-8") as file:
        file.writelines(name + "\n" for name in hosts.values())


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"translate.py: {sys.argv[1]}: {failure}")
