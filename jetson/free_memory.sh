#!/usr/bin/env bash
# Frees memory that a Jetson's GPU could use. Each thing is done only when it is asked for by name.
set -euo pipefail

usage() {
  cat <<'END'
usage: sudo jetson/free_memory.sh COMMAND [--now] [--dry-run] [--root DIR]

  status         what takes memory now; needs no sudo
  headless       no desktop from the next boot on (saves about 800 MiB); with --now stops it at
                 once, and every program in it
  undo-headless  what was started before `headless`
  zram-off       no swap in memory: off now and at the next boot
  zram-on        swap in memory again, from the next boot on
  drop-caches    give the page cache back once; the kernel fills it again

  --dry-run      print what would be done, and do nothing
  --root DIR     use another machine's files; for tests
END
}

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit "${2:-1}"
}

root='' command='' now=false dry_run=false
while [ $# -gt 0 ]; do
  case $1 in
    status | headless | undo-headless | zram-off | zram-on | drop-caches)
      [ -z "$command" ] || refuse "one command at a time: $command or $1" 2
      command=$1
      ;;
    --root)
      [ -n "${2:-}" ] || refuse "--root needs a directory" 2
      root=${2%/}
      shift
      ;;
    --now) now=true ;;
    --dry-run) dry_run=true ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) refuse "unknown argument $1; see jetson/free_memory.sh --help" 2 ;;
  esac
  shift
done
if [ -z "$command" ]; then
  usage >&2
  exit 2
fi
if $now && [ "$command" != headless ]; then refuse "--now belongs to headless" 2; fi
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

state="$root/var/lib/edgevlm"
text=multi-user.target
zram=nvzramconfig

run() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  $dry_run || "$@"
}

meminfo() {
  awk -v name="$1:" '$1 == name { print $2; found = 1 } END { if (!found) print 0 }' "$root/proc/meminfo"
}

zram_devices() {
  awk '$1 ~ /^\/dev\/zram/ { print $1 }' "$root/proc/swaps"
}

default_target() {
  local folder
  for folder in etc/systemd/system lib/systemd/system usr/lib/systemd/system; do
    if [ -L "$root/$folder/default.target" ]; then
      basename "$(readlink "$root/$folder/default.target")"
      return
    fi
  done
  echo unknown
}

zram_unit_is_here() {
  own_tools systemctl swapoff
  systemctl cat "$zram.service" >/dev/null 2>&1 || refuse "there is no $zram.service: this is not NVIDIA's Jetson Linux, or zram is set up by something else"
}

status() {
  printf 'available: %s MiB of %s MiB\n' $(($(meminfo MemAvailable) / 1024)) $(($(meminfo MemTotal) / 1024))
  printf 'page cache: %s MiB\n' $(($(meminfo Cached) / 1024))
  printf 'at boot: %s\n' "$(default_target)"
  printf 'zram: %s\n' "$(awk '$1 ~ /^\/dev\/zram/ { size += $3; used += $4 }
    END { if (size) printf "%d MiB of swap, %d MiB used", size / 1024, used / 1024; else print "none" }' "$root/proc/swaps")"
}

headless() {
  local before
  own_tools systemctl
  before=$(default_target)
  [ "$before" != unknown ] || refuse "systemd has no default.target here, so undo-headless could not restore it"
  if [ "$before" = "$text" ]; then
    printf 'no desktop is started at boot already\n'
  else
    run mkdir -p "$state"
    printf '+ echo %q > %q\n' "$before" "$state/default_target"
    $dry_run || printf '%s\n' "$before" >"$state/default_target"
    run systemctl set-default "$text"
  fi
  if $now; then
    run systemctl isolate "$text"
  else
    printf 'reboot to be without a desktop, or say --now. Back: free_memory.sh undo-headless\n'
  fi
}

undo_headless() {
  if [ ! -e "$state/default_target" ]; then
    printf 'nothing to undo: free_memory.sh headless changed nothing here\n'
    return
  fi
  own_tools systemctl
  run systemctl set-default "$(cat "$state/default_target")"
  run rm -f "$state/default_target"
  $dry_run || rmdir "$state" 2>/dev/null || true
  printf 'reboot to have it back\n'
}

zram_off() {
  local used device
  zram_unit_is_here
  # What lies there comes back to memory: it must have room.
  used=$(awk '$1 ~ /^\/dev\/zram/ { used += $4 } END { print used + 0 }' "$root/proc/swaps")
  if [ "$used" -gt "$(meminfo MemAvailable)" ]; then
    refuse "$((used / 1024)) MiB in zram would not fit into $(($(meminfo MemAvailable) / 1024)) MiB of available memory: close programs first"
  fi
  if [ "$(systemctl is-enabled "$zram" 2>/dev/null || true)" != disabled ]; then
    run systemctl disable --now "$zram"
  fi
  zram_devices | while read -r device; do
    run swapoff "$device"
  done
  printf 'zram is off. Back: free_memory.sh zram-on\n'
}

zram_on() {
  zram_unit_is_here
  if [ "$(systemctl is-enabled "$zram" 2>/dev/null || true)" = enabled ]; then
    printf 'zram is started at boot already\n'
    return
  fi
  # Not --now: NVIDIA's script cannot size devices that already have a size.
  run systemctl enable "$zram"
  printf 'reboot to have it back\n'
}

drop_caches() {
  run sync
  printf '+ echo 3 > %q\n' "$root/proc/sys/vm/drop_caches"
  $dry_run || echo 3 >"$root/proc/sys/vm/drop_caches"
}

if [ "$command" != status ] && [ -z "$root" ] && ! $dry_run && [ "$(id -u)" -ne 0 ]; then
  refuse "this needs root: sudo jetson/free_memory.sh $command"
fi
case $command in
  status) status ;;
  headless) headless ;;
  undo-headless) undo_headless ;;
  zram-off) zram_off ;;
  zram-on) zram_on ;;
  drop-caches) drop_caches ;;
esac
