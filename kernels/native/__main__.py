"""Compiles the CPU kernels ahead of time for this processor; with --all for every variant."""

import sys

from kernels.native.build import BUILT, LibraryUnavailable, best_variant, build, variants_here

if __name__ == "__main__":
    try:
        if "--all" in sys.argv:
            libraries = [build(variant, directory=BUILT) for variant in variants_here()]
        else:
            libraries = [build(best_variant())]
        sys.stdout.write("".join(f"{library}\n" for library in libraries))
    except LibraryUnavailable as error:
        sys.stdout.write(f"no native kernels: {error}\n")
        sys.exit("--all" in sys.argv)
