# The guard of one fault on the faulted host: what undoes it is on disk and a timer runs before anything is hurt.
# POSIX sh, sourced by every remote script of chaos; needs /proc, setsid, cksum. State: $PDGATE_GUARD/<tag>/.
PDGATE_GUARD=${PDGATE_GUARD:-/var/lib/pdgate}
PDGATE_LOCK=/run/pdgate-chaos.lock
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin
uptime_s() { cut -d. -f1 /proc/uptime; }
boot_id() { cat /proc/sys/kernel/random/boot_id; }
started() { # PID: its start time in ticks, empty where it is gone or a zombie
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 0 # no process is started for this: it stands between trigger and shot
  set -- ${stat##*) }
  [ "$1" = Z ] || echo "${20}"
}
same() { # PID START: still that process, not a reused pid
  [ -n "$2" ] && { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  ticks_wanted=$2; set -- ${stat##*) }
  [ "$1" != Z ] && [ "${20}" = "$ticks_wanted" ]
}
command_of() { tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | cksum | cut -d' ' -f1; }
signal_if_same() { # SIGNAL, then PID START COMMAND-CKSUM of each: all at once, and only the very processes that were meant
  signal=$1; shift; meant=
  while [ $# -gt 0 ]; do same "$1" "$2" && [ "$(command_of "$1")" = "$3" ] && meant="$meant $1"; shift 3; done
  [ -z "$meant" ] || kill "-$signal" $meant
}
moment() { read -r at_s rest </proc/uptime; echo "@@moment $at_s"; } # what counts has just been done: for the times of the report
ours() { [ "$(head -n1 "$PDGATE_GUARD/$1/owner" 2>/dev/null)" = "pdgate guard" ]; }
program_start() { # TAG NAME COMMAND...: in a session of its own, beside the guard, and noted as the process it is; its output is NAME.out
  cd "$PDGATE_GUARD/$1" || return 1
  program=$2; shift 2
  setsid "$@" </dev/null >"$program.out" 2>&1 &
  echo "$! $(started $!)" >"$program"
}
program_runs() { # TAG NAME: the very process that was noted; sets pid
  { read -r pid ticks <"$PDGATE_GUARD/$1/$2"; } 2>/dev/null && same "$pid" "$ticks"
}
program_end() { # TAG NAME: 0 where it ran
  program_runs "$1" "$2" && kill -9 "$pid"; set -- "$1" "$2" $?
  rm -f "$PDGATE_GUARD/$1/$2"
  return "$3"
}
guard_persist() { # TAG OWNER SURVIVES-REBOOT; the undo on stdin
  umask 077
  mkdir -p "$PDGATE_GUARD" || { echo "cannot write $PDGATE_GUARD"; return 1; }
  if [ -e "$PDGATE_GUARD/$1" ] && ! ours "$1"; then echo "$PDGATE_GUARD/$1 is not pdgate's: refused"; return 1; fi
  [ ! -e "$PDGATE_GUARD/$1" ] || { echo "$PDGATE_GUARD/$1 exists: an earlier fault was not healed; pytest chaos --cleanup"; return 1; }
  mkdir "$PDGATE_GUARD/$1" && cd "$PDGATE_GUARD/$1" || return 1
  printf 'pdgate guard\n%s\n' "$2" >owner; boot_id >boot; echo "$3" >survives; cat >undo; echo persisted >state
  sync . 2>/dev/null || sync
}
guard_arm() { # TAG SECONDS
  ours "$1" || { echo "$1 is not persisted"; return 1; }
  echo "$(($(uptime_s) + $2))" >"$PDGATE_GUARD/$1/deadline"
  setsid sh -c '. "$1/$2/lib.sh" && : >"$1/$2/ready"; until [ "$(uptime_s)" -ge "$(cat "$PDGATE_GUARD/$2/deadline" 2>/dev/null || echo 0)" ]; do sleep 0.2; done; guard_fire "$2" timer' \
    pdgate-guard "$PDGATE_GUARD" "$1" </dev/null >>"$PDGATE_GUARD/$1/log" 2>&1 &
  echo "$! $(started $!)" >"$PDGATE_GUARD/$1/timer"
}
guard_armed() { # TAG UNDO-CKSUM: the timer runs, has read its functions, and the undo is the one that was sent
  n=0; until [ -e "$PDGATE_GUARD/$1/ready" ]; do n=$((n + 1)); [ $n -lt 50 ] || return 1; sleep 0.05; done
  ours "$1" && [ "$(cksum <"$PDGATE_GUARD/$1/undo" | cut -d' ' -f1)" = "$2" ] && same $(cat "$PDGATE_GUARD/$1/timer")
}
guard_fire() { # TAG WHO: undo now, at most once at a time; says @@gone where somebody else has done it
  ours "$1" || { echo @@gone; return 0; }
  mkdir "$PDGATE_GUARD/$1/firing" 2>/dev/null || { n=0; while [ -e "$PDGATE_GUARD/$1/firing" ] && [ $n -lt 50 ]; do sleep 0.1; n=$((n + 1)); done; echo @@gone; return 0; }
  (. "$PDGATE_GUARD/$1/undo" && moment) && echo "undone by $2 at $(uptime_s)" >"$PDGATE_GUARD/$1/state"
  code=$?
  rmdir "$PDGATE_GUARD/$1/firing" 2>/dev/null
  if [ "$2" != controller ] && [ $code -eq 0 ]; then rm -rf "${PDGATE_GUARD:?}/$1"; guard_tidy; fi
  return $code
}
guard_disarm() { # TAG
  ours "$1" || return 0
  set -- "$1" $(cat "$PDGATE_GUARD/$1/timer" 2>/dev/null)
  [ -n "$2" ] && same "$2" "$3" && kill "$2" 2>/dev/null
  rm -rf "${PDGATE_GUARD:?}/$1"
  guard_tidy
}
guard_tidy() { # the last guard takes the boot replay with it
  for state in "$PDGATE_GUARD"/*/; do [ -e "$state" ] && return 0; done
  if [ -e /etc/systemd/system/pdgate-guard.service ]; then systemctl -q disable pdgate-guard.service; rm -f /etc/systemd/system/pdgate-guard.service; fi
  rm -f /etc/cron.d/pdgate-guard
  rmdir "$PDGATE_GUARD" 2>/dev/null; true # another fault may just be arriving: then it stays
}
guard_replay() { # after a reboot, and for --cleanup: undo whatever is still written down
  for state in "$PDGATE_GUARD"/*/; do
    tag=$(basename "$state"); ours "$tag" || continue
    if [ "$1" = all ] || { [ "$(cat "$state/boot")" != "$(boot_id)" ] || ! same $(cat "$state/timer" 2>/dev/null || echo 0 0); }; then
      echo "$tag: $(sed -n 2p "$state/owner")"; guard_fire "$tag" "${2:-replay}" && guard_disarm "$tag"
    fi
  done
  guard_tidy
}
lock_holder() { # who holds this host, and for how many seconds yet; nothing where nobody does (past its time, of before a reboot)
  { read -r owner until boot <"$PDGATE_LOCK/held"; } 2>/dev/null || return 0
  [ "$boot" != "$(boot_id)" ] || [ "$until" -le "$(uptime_s)" ] || echo "$owner $((until - $(uptime_s)))"
}
lock_take() { # OWNER SECONDS: one chaos run at a time
  if ! mkdir "$PDGATE_LOCK" 2>/dev/null; then
    [ -e "$PDGATE_LOCK/held" ] || { echo "$PDGATE_LOCK is being taken by another run"; return 1; }
    set -- "$1" "$2" $(lock_holder)
    [ "${3:-$1}" = "$1" ] || { echo "another chaos run holds this host: $3, for another $4 s at most"; return 1; }
  fi
  echo "$1 $(($(uptime_s) + $2)) $(boot_id)" >"$PDGATE_LOCK/held"
}
lock_drop() { # OWNER
  { read -r owner until boot <"$PDGATE_LOCK/held"; } 2>/dev/null
  [ "$owner" != "$1" ] || rm -rf "$PDGATE_LOCK"
}
lock_break() { # for --cleanup: whoever held it
  { read -r owner until boot <"$PDGATE_LOCK/held"; } 2>/dev/null && echo "lock of ${owner%%:*}" && rm -rf "$PDGATE_LOCK"
  true
}
