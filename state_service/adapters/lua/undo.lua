-- undo.lua: take back an acquire whose claim was refused. The owner before it is restored, the lock released,
-- and where the acquire had created the conversation's state, nothing is left. The version stays: it never
-- goes back. Repeating it does nothing.
--
-- KEYS    as in ops.lua (five)
-- ARGV    1 version  2 run  3 token  4 previous run ('' for none)
-- Returns 1 undone, 0 there was nothing of this run to undo

local _, wrong = check_keys()
if wrong then return wrong end

local version, run, token, previous = whole(ARGV[1], 1, MAX_NUMBER), ARGV[2], ARGV[3], ARGV[4]
if not (version and token and previous) or run == '' then return input('version, run, token or previous run') end
if not is_or_none(LOCK, 'hash') then return wrong_type(LOCK, 'hash') end
local state
state, wrong = read_state()
if wrong then return wrong end

local held = redis.call('HMGET', LOCK, 'run', 'token')
if held[1] == run and held[2] == token then redis.call('DEL', LOCK) end
if not state.exists or state.version ~= version or state.lastTraceId ~= run then return 0 end
if state.createdBy == run and not state.stamped then
  redis.call('DEL', STATE)
else
  redis.call('HSET', STATE, 'lastTraceId', previous, 'versionTrace', '')
end
return 1
