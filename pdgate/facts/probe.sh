# The pdgate probe: POSIX sh, read from stdin by a shell on the host. It reads; it writes nothing, not even a temporary file.
# Parameters are assigned in front of it: NONCE, DEVICES ("0 1 2"), LAUNCH and LOGS (paths, one a line), TOOL_TIMEOUT (s),
# QUICK (not empty: processes and sockets only).
# Every section is bracketed, and its exit code kept: what failed is unknown, never empty.
LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/sbin:/sbin:/usr/local/bin:/usr/local/Ascend/driver/tools"; export PATH
NL='
'
section() { # NAME COMMAND...: run a command inside a bracketed section
  name=$1; shift
  printf '@@%s begin %s\n' "$NONCE" "$name"
  "$@"
  printf '\n@@%s end %s %s\n' "$NONCE" "$name" "$?"
}
have() { command -v "$1" >/dev/null 2>&1; }
absent() { printf '@absent %s\n' "$1"; return 127; }
bounded() { if have timeout; then timeout "$TOOL_TIMEOUT" "$@"; else "$@"; fi; }

# Secrets are taken out here, on the host: values of telling names, and credentials inside URLs.
redact() {
  sed -E -e 's/(([A-Za-z0-9_-]*(KEY|TOKEN|SECRET|PASSW|CREDENTIAL)[A-Za-z0-9_-]*)[=: ]+)[^ "'"'"'[:cntrl:]]+/\1<redacted>/g' \
         -e 's/(--?[a-z0-9-]*(key|token|secret|passw)[a-z0-9-]*[=[:cntrl:] ])[^ "'"'"'[:cntrl:]]+/\1<redacted>/g' \
         -e 's#(://[^/@: ]+:)[^@/ ]+@#\1<redacted>@#g'
}

identity() {
  printf 'uid %s\n' "$(id -u)"
  printf 'hostname %s\n' "$(cat /proc/sys/kernel/hostname)"
  printf 'kernel %s\n' "$(cat /proc/sys/kernel/osrelease)"
  printf 'boot_id %s\n' "$(cat /proc/sys/kernel/random/boot_id)"
  printf 'hz %s\n' "$(getconf CLK_TCK 2>/dev/null || echo 100)"
  printf 'netns %s\n' "$(readlink /proc/self/ns/net)"
  printf 'mntns %s\n' "$(readlink /proc/self/ns/mnt)"
  printf 'uptime %s\n' "$(date +%s.%N) $(cat /proc/uptime)"
}
zone() {
  printf 'offset %s\n' "$(date +%z)"
  printf 'localtime %s\n' "$(readlink -f /etc/localtime)"
  [ -d /etc/timezone ] && echo 'timezone directory'
  [ -f /etc/timezone ] && printf 'timezone %s\n' "$(cat /etc/timezone)"
  return 0
}
ports() {
  printf 'ephemeral %s\n' "$(cat /proc/sys/net/ipv4/ip_local_port_range)"
  printf 'reserved %s\n' "$(cat /proc/sys/net/ipv4/ip_local_reserved_ports)"
}
addresses() { have ip || { absent ip; return; }; ip -o addr show; }
sockets() { cat /proc/net/tcp /proc/net/tcp6 2>/dev/null; [ -r /proc/net/tcp ]; }
owners() { ls -l /proc/[0-9]*/fd 2>/dev/null | grep -E '^/proc/|socket:'; }
stats() { cat /proc/[0-9]*/stat 2>/dev/null | grep .; }
# Arguments are separated by \001, so that a line stays a line.
cmdlines() { grep -a '' /proc/[0-9]*/cmdline 2>/dev/null | tr '\000' '\001' | redact; }
candidates() { grep -alE 'vllm|VLLM|mooncake' /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3; }

# Per engine process: namespaces, container, and the environment variables that matter (others never leave the host).
NAMES='^(VLLM|ASCEND|HCCL|MC|MOONCAKE|NCCL|UCX|GLOO|TP|OMP|PYTORCH|TASK|CUDA|NIXL)_|^(TZ|PYTHONHASHSEED|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV)='
engines() {
  for pid in $(candidates); do
    [ "$pid" = "$$" ] && continue
    # A process that is gone (the grep that found it, for one) is no denial.
    [ -r "/proc/$pid/environ" ] || { [ -d "/proc/$pid" ] && printf '@denied %s\n' "$pid"; continue; }
    mnt=$(readlink "/proc/$pid/ns/mnt") || continue
    printf '@pid %s %s %s %s\n' "$pid" "$mnt" "$(readlink "/proc/$pid/ns/net")" "$(readlink "/proc/$pid/exe")"
    sed 's/^/@cgroup /' "/proc/$pid/cgroup" 2>/dev/null
    tr '\n\000' ' \n' < "/proc/$pid/environ" 2>/dev/null | grep -E "$NAMES" | redact | sed 's/^/@env /'
    case "$seen" in *"$mnt"*) continue ;; esac
    seen="$seen $mnt"; root="/proc/$pid/root"
    tz=$(tr '\000' '\n' < "/proc/$pid/environ" | sed -n 's/^TZ=//p' | head -n 1)
    if [ -n "$tz" ]; then printf '@zone %s %s\n' "$mnt" "$(TZ="$tz" date +%z)"
    elif [ -e "$root/etc/localtime" ]; then printf '@zone %s %s\n' "$mnt" "$(TZ=":$root/etc/localtime" date +%z)"
    else printf '@zone %s +0000\n' "$mnt"; fi
    [ -d "$root/etc/timezone" ] && printf '@timezone-directory %s\n' "$mnt"
    [ -e "$root/etc/hccn.conf" ] && printf '@hccn-conf %s\n' "$mnt"
    first=$(tr '\000' '\n' < "/proc/$pid/cmdline" | head -n 1)
    for prefix in "${first%/bin/*}" "$(readlink "/proc/$pid/exe" | sed 's#/bin/.*##')"; do
      for info in "$root$prefix"/lib/python3*/site-packages/*.dist-info; do
        case "${info##*/}" in vllm-*|vllm_ascend-*|mooncake*|nixl-*|torch_npu-*) printf '@package %s %s\n' "$mnt" "${info##*/}" ;; esac
      done
    done
    # Sockets of a container with a network of its own are not in the host's tables.
    net=$(readlink "/proc/$pid/ns/net")
    case "$nets" in *"$net"*) ;; *)
      nets="$nets $net"
      [ "$net" = "$(readlink /proc/self/ns/net)" ] || cat "/proc/$pid/net/tcp" "/proc/$pid/net/tcp6" 2>/dev/null | sed "s/^/@tcp $net /" ;;
    esac
  done
}
# Only the fields named here: a container's environment holds secrets.
FIELDS='{{.Id}}|{{.Name}}|{{.State.Pid}}|{{.HostConfig.NetworkMode}}|{{json .NetworkSettings.Ports}}|{{json .Mounts}}|{{.Config.Image}}'
containers() {
  for tool in docker podman; do
    have $tool || continue
    found=1
    ids=$(bounded $tool ps -q 2>&1) || { printf '@failed %s %s\n' "$tool" "$ids"; return 1; }
    [ -z "$ids" ] || bounded $tool inspect --format "$FIELDS" $ids || return 1
  done
  [ -n "$found" ] || absent 'docker or podman'
}
leftovers() {
  roots=/
  for pid in $(candidates); do [ -r "/proc/$pid/root/tmp" ] && roots="$roots /proc/$pid/root/"; done
  have stat || { absent stat; return; }
  for root in $roots; do
    for path in "$root"tmp/mooncake* "$root"tmp/transfer_engine* "$root"dev/shm/mooncake* "$root"dev/shm/ascend*; do
      [ -e "$path" ] && stat -c "%d:%i|%Y|%s|%F|%n" "$path"
    done
  done
  return 0
}
# One line of one query of one device, written whole: devices run side by side without a temporary file.
hccn_query() {
  answer=$(bounded hccn_tool -i "$1" "-$2" -g 2>&1); code=$?
  printf '%s\n' "$answer" | while IFS= read -r line; do printf '@line %s %s %s\n' "$1" "$2" "$line"; done
  printf '@code %s %s %s\n' "$1" "$2" "$code"
}
hccn() {
  have hccn_tool || { absent hccn_tool; return; }
  for device in $DEVICES; do
    ( for query in link net_health netdetect tls ip link_stat stat stat_extra; do hccn_query "$device" "$query"; done ) &
  done
  wait
}
npu() { have npu-smi || { absent npu-smi; return; }; bounded npu-smi info; }
cann() { for file in /usr/local/Ascend/ascend-toolkit/latest/version.cfg /usr/local/Ascend/driver/version.info; do [ -r "$file" ] && sed "s#^#$file #" "$file"; done; return 0; }
files() { # paths, one a line: a section each
  printf '%s\n' "$1" | while IFS= read -r path; do
    [ -n "$path" ] || continue
    section "$2:$path" "$2" "$path"
  done
}
launch() { [ -r "$1" ] || { printf '@unreadable\n'; return 1; }; redact < "$1"; }
log() {
  path=$1
  if [ ! -r "$path" ]; then
    for pid in $(candidates); do [ -r "/proc/$pid/root$path" ] && path="/proc/$pid/root$path" && break; done
  fi
  [ -r "$path" ] || { printf '@unreadable\n'; return 1; }
  stat -c '@stat %s %Y %i' "$path" 2>/dev/null
  grep -a -n -B 6 'Application startup complete' "$path" | tail -n 16 | redact | sed 's/^/@started /'
  tail -n 120 "$path" | redact | sed 's/^/@tail /'
}

section identity identity
section zone zone
section ports ports
section addresses addresses
section sockets sockets
section owners owners
section stats stats
section cmdlines cmdlines
section engines engines
if [ -n "$QUICK" ]; then printf '@@%s done\n' "$NONCE"; exit 0; fi
section containers containers
section leftovers leftovers
section hccn hccn
section npu npu
section cann cann
files "$LAUNCH" launch
files "$LOGS" log
printf '@@%s done\n' "$NONCE"
