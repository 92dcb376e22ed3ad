"""A peer that fails, and whose child outlives it unless it is ended, too."""

import subprocess
import sys

print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
raise SystemExit(1)
