#!/usr/bin/env bash
# Makes edgevlm run on a Jetson: TensorRT for Python from apt, a virtual environment, edgevlm from
# this checkout; with --service a systemd unit. It changes nothing else; it may be run again.
# docs/jetson.md tells the whole way.
set -euo pipefail

usage() {
  cat <<'END'
usage: jetson/setup.sh [--venv DIR] [--service BUNDLE] [--yes] [--dry-run] [--root DIR]

Run it as yourself: it calls sudo for apt and for the service, and for nothing else.

  --venv DIR        where the virtual environment goes (default: ~/edgevlm-venv)
  --service BUNDLE  serve this bundle from every start of the machine on, as your user
  --yes             do not ask
  --dry-run         print what would be done, and do nothing
  --root DIR        read another machine's files; for tests
END
}

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit "${2:-1}"
}

root='' venv="${HOME:-/root}/edgevlm-venv" bundle='' yes=false dry_run=false
while [ $# -gt 0 ]; do
  case $1 in
    --venv | --service | --root)
      [ -n "${2:-}" ] || refuse "$1 needs a directory" 2
      case $1 in
        --venv) venv=$2 ;;
        --service) bundle=$2 ;;
        --root) root=${2%/} ;;
      esac
      shift
      ;;
    --yes) yes=true ;;
    --dry-run) dry_run=true ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) refuse "unknown argument $1; see jetson/setup.sh --help" 2 ;;
  esac
  shift
done

# With --root nothing of this machine is used: the tools must be that machine's own.
if [ -n "$root" ]; then PATH="$root/usr/bin:$root/usr/sbin:$PATH"; fi
own_tools() {
  local tool
  for tool; do
    case $(command -v "$tool" || true) in
      '') refuse "there is no $tool here" ;;
      "$root"/*) ;;
      *) refuse "$root has no $tool of its own" ;;
    esac
  done
}

checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# --- which machine ------------------------------------------------------------------------------

release="$root/etc/nv_tegra_release"
[ -r "$release" ] || refuse "this is no Jetson: there is no $release; on other machines type pip install 'edgevlm[host]'"
l4t=$(sed -nE 's/^# R([0-9]+) \(release\), REVISION: ([0-9]+(\.[0-9]+)*).*/\1.\2/p' "$release" | head -n 1)
[ -n "$l4t" ] || refuse "$release does not say which L4T this is; reinstall the package nvidia-l4t-core"

soc=''
if [ -r "$root/proc/device-tree/compatible" ]; then
  soc=$(tr '\0' '\n' <"$root/proc/device-tree/compatible" | sed -n 's/^nvidia,\(tegra[0-9]*\)$/\1/p')
fi

flash='flash JetPack 6.2.2 or 7.2.1'
note=''
case $l4t in
  36.4 | 36.4.* | 36.5 | 36.5.*) extra=jetson6 python=3.10 jetpack='JetPack 6' ;;
  39.2 | 39.2.*) extra=jetson7 python=3.12 jetpack='JetPack 7' ;;
  38.2 | 38.2.* | 38.4 | 38.4.*)
    [ "$soc" = tegra264 ] || refuse "L4T $l4t (JetPack 7.0 or 7.1) is for Thor, and this is ${soc:-an unknown chip}: flash JetPack 7.2.1"
    extra=jetson7 python=3.12 jetpack='JetPack 7'
    note="L4T $l4t has a TensorRT without attention of its own; JetPack 7.2.1 has one"
    ;;
  36.*) refuse "L4T $l4t (JetPack 6.0) has TensorRT 8.6, and edgevlm needs 10.3: $flash" ;;
  [0-9].* | [12][0-9].* | 3[0-5].*) refuse "L4T $l4t (JetPack 5 or older) has a TensorRT and a Python that are too old: $flash" ;;
  *) refuse "L4T $l4t is not a release that edgevlm knows (36.4, 36.5, 39.2; on Thor also 38.2, 38.4): $flash" ;;
esac
if [ "$l4t" = 36.4.7 ]; then
  note='L4T 36.4.7 refuses large CUDA allocations; edgevlm doctor says how to upgrade to 36.5'
fi
interpreter="$root/usr/bin/python$python"

# --- what is missing ----------------------------------------------------------------------------

installed() {
  [ -r "$root/var/lib/dpkg/status" ] && awk -v package="$1" '
    /^Package: / { here = ($2 == package) }
    here && /^Status: install ok installed$/ { found = 1 }
    END { exit !found }' "$root/var/lib/dpkg/status"
}

# Not the package tensorrt: it brings headers and static libraries that nothing here uses.
tensorrt=(libnvinfer10 libnvinfer-plugin10 libnvonnxparsers10 python3-libnvinfer)
packages=()
for package in "${tensorrt[@]}" "python$python-venv"; do
  installed "$package" || packages+=("$package")
done

if [ -e "$venv" ]; then
  [ -r "$venv/pyvenv.cfg" ] || refuse "$venv is there and is no virtual environment: choose another place with --venv DIR"
  grep -qiE '^include-system-site-packages *= *true' "$venv/pyvenv.cfg" ||
    refuse "$venv was made without --system-site-packages, so it cannot see TensorRT: remove it, or choose --venv DIR"
  grep -qE "^version(_info)? *= *${python/./\\.}(\.|$)" "$venv/pyvenv.cfg" ||
    refuse "$venv is not for Python $python, the only one that this TensorRT works with: remove it, or choose --venv DIR"
  [ -x "$venv/bin/python" ] || refuse "$venv has no working bin/python: remove it and run this again"
fi

# --- the service --------------------------------------------------------------------------------

unit="$root/etc/systemd/system/edgevlm.service" conf="$root/etc/edgevlm.conf"
if [ -n "$bundle" ]; then
  [ -f "$bundle/bundle.json" ] || refuse "$bundle is no bundle: there is no bundle.json in it; edgevlm build makes one"
  bundle=$(cd -- "$bundle" && pwd)
  if [ -r "$conf" ] && ! grep -qxF "BUNDLE=$bundle" "$conf"; then
    refuse "$conf is there and serves another bundle: change its line BUNDLE=, then sudo systemctl restart edgevlm"
  fi
  # systemd splits and expands words; what it would leave alone is all that is taken.
  for path in "$bundle" "$venv"; do
    case $path in
      /*) ;;
      *) refuse "systemd needs a whole path, and $path is none: begin it with /" ;;
    esac
    case $path in *[!A-Za-z0-9._/+@-]*) refuse "systemd would misread the path $path: use letters, digits and . _ + @ -" ;; esac
  done
fi

# The unit of this checkout with the user and the environment of this machine.
fill_unit() {
  sed -e "s|^User=.*|User=$(id -un)|" -e "s|^ExecStart=[^ ]*|ExecStart=$venv/bin/edgevlm|" "$checkout/jetson/edgevlm.service"
}

# --- what is done about it ----------------------------------------------------------------------

if [ -z "$root" ] && [ -n "${SUDO_USER:-}" ]; then
  refuse "run this without sudo, or the virtual environment will be root's; it calls sudo for apt"
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi

run() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  $dry_run || "$@"
}

steps() {
  if [ ${#packages[@]} -gt 0 ]; then
    run ${as_root[@]+"${as_root[@]}"} apt-get update
    run ${as_root[@]+"${as_root[@]}"} apt-get install --yes --no-install-recommends "${packages[@]}"
  fi
  if [ ! -e "$venv" ]; then
    run "$interpreter" -m venv --system-site-packages "$venv"
  fi
  # cuda-bindings and its bounds stand in setup.py; TensorRT never comes from pip on a Jetson.
  run "$venv/bin/python" -m pip --disable-pip-version-check install --editable "${checkout}[$extra${bundle:+,server}]"
}

install_service() {
  local filled
  filled=$(mktemp -d)
  fill_unit >"$filled/edgevlm.service"
  printf 'BUNDLE=%s\nOPTIONS=\n' "$bundle" >"$filled/edgevlm.conf"
  run ${as_root[@]+"${as_root[@]}"} install -m 644 "$filled/edgevlm.service" "$unit"
  # A second run keeps what its owner wrote there.
  [ -e "$conf" ] || run ${as_root[@]+"${as_root[@]}"} install -m 644 "$filled/edgevlm.conf" "$conf"
  rm -r "$filled"
  run ${as_root[@]+"${as_root[@]}"} systemctl daemon-reload
  run ${as_root[@]+"${as_root[@]}"} systemctl enable edgevlm.service
  run ${as_root[@]+"${as_root[@]}"} systemctl restart edgevlm.service
}

model=unknown
if [ -r "$root/proc/device-tree/model" ]; then model=$(tr -d '\0' <"$root/proc/device-tree/model"); fi
printf 'board: %s\nL4T: %s (%s), Python %s, [%s]\n' "$model" "$l4t" "$jetpack" "$python" "$extra"
if [ -n "$note" ]; then printf 'note: %s\n' "$note"; fi

if ! $dry_run; then
  if ! $yes; then
    printf 'missing packages: %s\nvirtual environment: %s\n' "${packages[*]:-none}" "$venv"
    [ -t 0 ] || refuse "nobody to ask: say --yes, or --dry-run to see the commands"
    read -r -p 'Go on? [y/N] ' answer
    case $answer in
      y | Y | yes) ;;
      *) refuse 'nothing was done' ;;
    esac
  fi
fi
if ! $dry_run && [ ${#packages[@]} -gt 0 ]; then
  own_tools ${as_root[@]+"${as_root[@]}"} apt-get
fi
if ! $dry_run && [ -n "$bundle" ]; then own_tools ${as_root[@]+"${as_root[@]}"} systemctl; fi
steps

doctor=("$venv/bin/edgevlm" doctor)
if [ -n "$root" ]; then doctor+=(--root "$root"); fi
status=0
run "${doctor[@]}" || status=$?
if [ -n "$bundle" ]; then
  [ "$status" -eq 0 ] || refuse 'the service was left out, because doctor found something: mend that, and run this again'
  install_service
fi
if ! $dry_run; then printf 'from now on: source %q\n' "$venv/bin/activate"; fi
exit "$status"
