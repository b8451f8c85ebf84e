-- abandon.lua: a run is given up. While it still owns the conversation, record its end (the ops) and free its
-- lock; the owner mark stays, so that the next begin sees an unfinished predecessor. The data stamp is not
-- raised: a run that died before it had loaded must not make old data look new.
--
-- KEYS    as in ops.lua
-- ARGV    1 run  2 now_ms  3 ttl_ms  4 hash of the ops  5 … the ops: their number, then as in ops.lua
-- Returns 1 owned (now or by a repeat of this call), 0 it owns nothing

local keys_prefix, wrong = check_keys()
if wrong then return wrong end
prefix = keys_prefix

local run, now, hash = ARGV[1], whole(ARGV[2], 0, MAX_NUMBER), ARGV[4]
ttl = whole(ARGV[3], 1, MAX_TTL)
if not (now and ttl and hash) or run == '' or hash == '' then return input('run, now, ttl or hash') end
if not is_or_none(LOCK, 'hash') then return wrong_type(LOCK, 'hash') end
local ops
ops, wrong = read_ops(5, run, '')
if wrong then return wrong end
local state
state, wrong = read_state()
if wrong then return wrong end

if redis.call('HGET', LOCK, 'run') == run then redis.call('DEL', LOCK) end
if not state.exists or state.deleted ~= '' or state.lastTraceId ~= run then return 0 end
if state.abandonHash ~= hash then
  apply(ops, state.seq, { 'abandonHash', hash, 'updatedAt', text_of(now) })
end
return 1
