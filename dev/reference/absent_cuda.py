#!/usr/bin/env python3
"""
Lets PyTorch's wheel for CUDA run on the CPU without the CUDA libraries, which take 3 GB. Its shared objects are linked
with them, so that it does not start without them. This program writes libraries of these names beside its own, whose
functions end the process with a message. Call it with the interpreter of an environment that has torch and
nvidia-cuda-runtime, whose library is small. On a
machine with a GPU, CUDA_VISIBLE_DEVICES must be empty. Requires cc and readelf.

Usage: absent_cuda.py
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

CALLED = """
#include <stdio.h>
#include <stdlib.h>
void absent_cuda(void) {
    fputs("PyTorch called a CUDA library, which dev/reference/absent_cuda.py has replaced: it runs on the CPU only\\n",
          stderr);
    abort();
}
"""


def readelf(path, *options):
    out = subprocess.run(["readelf", "-W", *options, path], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in out.splitlines()]


def main():
    torch = Path(importlib.util.find_spec("torch").origin).parent
    own = sorted((torch / "lib").glob("*.so*"))
    present = {p.name for p in own} | {p.name for p in torch.parent.glob("nvidia/*/lib/*.so*")}
    missing, versions, undefined, defined = set(), {}, set(), set()
    for path in own:
        names = [line[-1].strip("[]") for line in readelf(path, "-d") if "(NEEDED)" in line]
        missing |= {n for n in names if n.startswith(("libcu", "libnv", "libnccl")) and n not in present}
        for line in readelf(path, "-V"):  # 0x0000: Version: 1  File: libcublas.so.13  Cnt: 1, then its versions
            if "File:" in line:
                library = line[line.index("File:") + 1]
            elif "Name:" in line and "Flags:" in line and "Index:" not in line:
                versions[library] = line[line.index("Name:") + 1]
        for symbol in (line for line in readelf(path, "--dyn-syms") if len(line) > 7 and line[0][:-1].isdigit()):
            name = symbol[7].partition("@")[0]
            (undefined if symbol[6] == "UND" else defined).add(name)
    missing.discard("libcuda.so.1")  # of the driver, opened only where there is one
    wanted = sorted(n for n in undefined - defined if n.lower().startswith(("cu", "nv", "nccl")))
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work) / "absent.c", Path(work) / "version"
        lines = "".join(f'__asm__(".globl {name}\\n.set {name}, absent_cuda");\n' for name in wanted)
        source.write_text(CALLED + lines)
        for library in sorted(missing):
            script.write_text(f"{versions.get(library, 'ABSENT')} {{ *; }};\n")
            to = ["-o", torch / "lib" / library, f"-Wl,-soname,{library}", f"-Wl,--version-script,{script}"]
            subprocess.run(["cc", "-shared", "-fPIC", source, *to], check=True)
    print(f"{len(missing)} libraries with {len(wanted)} functions: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    sys.exit(main())
