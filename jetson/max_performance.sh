#!/usr/bin/env bash
# Sets a Jetson's fastest power mode and pins its clocks, after storing what was set before.
# nvpmodel's mode outlives a reboot; jetson_clocks does not.
set -euo pipefail

usage() {
  cat <<'END'
usage: sudo jetson/max_performance.sh [on | undo | status] [--dry-run] [--root DIR]

  on          the fastest power mode, all clocks at their highest (default)
  undo        the mode and clocks that were set before `on`
  status      what is set now, and what undo would restore; needs no sudo
  --dry-run   print what would be done, and do nothing
  --root DIR  use another machine's files; for tests
END
}

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit "${2:-1}"
}

root='' action='' dry_run=false
while [ $# -gt 0 ]; do
  case $1 in
    on | undo | status)
      [ -z "$action" ] || refuse "one of on, undo and status at a time" 2
      action=$1
      ;;
    --root)
      [ -n "${2:-}" ] || refuse "--root needs a directory" 2
      root=${2%/}
      shift
      ;;
    --dry-run) dry_run=true ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) refuse "unknown argument $1; see jetson/max_performance.sh --help" 2 ;;
  esac
  shift
done
action=${action:-on}

# With --root nothing of this machine is used: the tools must be that machine's own.
if [ -n "$root" ]; then PATH="$root/usr/bin:$root/usr/sbin:$PATH"; fi
own_tools() {
  local tool
  for tool; do
    case $(command -v "$tool" || true) in
      '') refuse "there is no $tool here": sudo apt install nvidia-l4t-nvpmodel nvidia-l4t-tools ;;
      "$root"/*) ;;
      *) refuse "$root has no $tool of its own" ;;
    esac
  done
}

conf="$root/etc/nvpmodel.conf"
state="$root/var/lib/edgevlm"

run() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  $dry_run || "$@"
}

# The number of the mode that is set, without leading zeros; nothing where it cannot be told.
current_mode() {
  local mode
  mode=$(sed -n 's/^.*pmode:0*\([0-9][0-9]*\).*$/\1/p' "$root/var/lib/nvpmodel/status" 2>/dev/null | head -n 1) || true
  if [ -z "$mode" ]; then mode=$(nvpmodel -q 2>/dev/null | sed -n 's/^\([0-9][0-9]*\)$/\1/p' | tail -n 1) || true; fi
  printf '%s' "$mode"
}

# "ID NAME" of the fastest mode: MAXN or MAXN_SUPER; where there is none, the one with most watts.
fastest_mode() {
  sed -nE 's/^<[ \t]*POWER_MODEL[ \t]+ID=([0-9]+)[ \t]+NAME=([^ \t>]+)[ \t]*>.*/\1 \2/p' "$conf" | awk '
    $2 ~ /^MAXN/ && !found { found = 1; best = $0 }
    !found && match($2, /[0-9]+W/) { watts = substr($2, RSTART) + 0; if (watts > most) { most = watts; best = $0 } }
    END { print best }'
}

mode_name() {
  sed -nE "s/^<[ \t]*POWER_MODEL[ \t]+ID=$1[ \t]+NAME=([^ \t>]+)[ \t]*>.*/\1/p" "$conf" | head -n 1
}

set_mode() {
  local now
  now=$(current_mode)
  if [ "$now" = "$1" ]; then
    printf 'power mode %s (%s) is set already\n' "$1" "$(mode_name "$1")"
    return
  fi
  # Some modes need a reboot: nvpmodel asks, and without a yes it leaves the mode as it was.
  run nvpmodel -m "$1" || true
  if $dry_run; then return; fi
  now=$(current_mode)
  [ "$now" = "$1" ] || refuse "power mode $1 was not set (it is ${now:-unknown}); if nvpmodel asked for a reboot, answer yes, and run this again afterwards"
}

[ -r "$conf" ] || refuse "there is no $conf: this is no Jetson, or the package nvidia-l4t-nvpmodel is missing"

if [ "$action" = status ]; then
  now=$(current_mode)
  best=$(fastest_mode)
  printf 'power mode: %s (%s)\nfastest: %s (%s)\n' "${now:-unknown}" "$(mode_name "${now:-none}")" "${best%% *}" "${best#* }"
  if [ -e "$state/power_mode" ]; then
    printf 'undo restores: power mode %s\n' "$(cat "$state/power_mode")"
  else
    printf 'undo restores: nothing; max_performance.sh is not on\n'
  fi
  exit 0
fi

own_tools nvpmodel jetson_clocks
if [ -z "$root" ] && ! $dry_run && [ "$(id -u)" -ne 0 ]; then
  refuse "this needs root: sudo jetson/max_performance.sh $action"
fi

if [ "$action" = on ]; then
  best=$(fastest_mode)
  [ -n "$best" ] || refuse "$conf names no power mode by MAXN or by watts: choose one with sudo nvpmodel -m NUMBER"
  # Kept until undo: a second `on` must not take what the first one set for what was before.
  if [ ! -e "$state/power_mode" ]; then
    now=$(current_mode)
    [ -n "$now" ] || refuse "nvpmodel does not say which power mode is set, so undo could not restore it"
    run mkdir -p "$state"
    # jetson_clocks asks before it overwrites a file, so an unfinished one goes first.
    run rm -f "$state/clocks.new"
    run jetson_clocks --store "$state/clocks.new"
    run mv "$state/clocks.new" "$state/clocks"
    printf '+ echo %s > %q\n' "$now" "$state/power_mode"
    $dry_run || printf '%s\n' "$now" >"$state/power_mode"
  fi
  set_mode "${best%% *}"
  run jetson_clocks
  printf 'on: %s. Clocks are lost at a reboot: run this again after one. Back: max_performance.sh undo\n' "${best#* }"
else
  if [ ! -e "$state/power_mode" ]; then
    printf 'nothing to undo: max_performance.sh is not on\n'
    exit 0
  fi
  # Clocks first: their lower bounds must not stand above what the old mode allows.
  run jetson_clocks --restore "$state/clocks"
  set_mode "$(cat "$state/power_mode")"
  run rm -f "$state/power_mode" "$state/clocks"
  $dry_run || rmdir "$state" 2>/dev/null || true
fi
