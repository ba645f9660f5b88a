#!/bin/sh
# Says in one message everything that a build needs and this machine lacks, and the one command that brings it.
#   check_needs.sh [venv] [cuda]     PYTHON, CC, CXX: the commands to look at; venv: environments are made with PYTHON
# Exit status 1 if anything is missing. POSIX sh, since nothing else is sure to be there.

PYTHON=${PYTHON:-python3} CC=${CC:-cc} CXX=${CXX:-c++}
lacks='' apt='' dnf=''

lack() { # what, Debian's package, Fedora's package
    lacks="$lacks
  - $1"
    apt="$apt $2" dnf="$dnf $3"
}

compiles() { # command, language, program
    folder=$(mktemp -d) || exit 1
    printf '%s\n' "$3" | $1 -x "$2" -o "$folder/program" - > /dev/null 2>&1
    status=$?
    rm -rf "$folder"
    return $status
}

ask_python() { "$PYTHON" -c "$1" 2> /dev/null; }

# python3-dev, or python3.12-dev for a Python of that name which is not the system's first
name=$(basename "$PYTHON")
case $name in python3.*) ;; *) name=python3 ;; esac

[ "$(uname -s)" = Linux ] || lack "Linux (this is $(uname -s))" '' ''
if ! command -v "$PYTHON" > /dev/null; then
    lack "Python 3.10 or later: $PYTHON was not found (PYTHON=... names another one)" 'python3 python3-venv python3-dev' 'python3 python3-devel'
elif ! ask_python 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    lack "Python 3.10 or later: $PYTHON is older (PYTHON=... names another one)" 'python3 python3-venv python3-dev' 'python3 python3-devel'
else
    case " $* " in *' venv '*)
        ask_python 'import ensurepip, venv' || lack "virtual environments: $PYTHON has no venv with ensurepip" "$name-venv" "$name" ;;
    esac
    headers=$(ask_python 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] || lack "the headers of $PYTHON: there is no $headers/Python.h" "$name-dev" "$name-devel"
fi
compiles "$CC" c 'int main(void) { return 0; }' || lack "a C compiler: $CC is missing or can't build a program (CC=... names another one)" gcc gcc
compiles "$CXX" c++ '#include <thread>
int main() { return 0; }' || lack "a C++ compiler: $CXX is missing or can't build a program (CXX=... names another one)" g++ gcc-c++
command -v git > /dev/null || lack 'git, which applies the patches: it was not found' git git
case " $* " in *' cuda '*)
    command -v "${CUDACXX:-nvcc}" > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] ||
        lack 'the CUDA toolkit: nvcc was not found (CUDACXX=/path/to/nvcc names it; build without CUDA=1 for the CPU alone)' nvidia-cuda-toolkit cuda-toolkit ;;
esac

[ -n "$lacks" ] || exit 0
{
    echo "error: this machine lacks what the build needs:$lacks"
    [ -z "$apt" ] || echo "  Debian, Ubuntu:  sudo apt install$apt"
    [ -z "$dnf" ] || echo "  Fedora, RHEL:    sudo dnf install$dnf"
    echo '  Then run the same command again.'
} >&2
exit 1
