-- renew.lua: take a conversation's lock and raise its fence, in one step (B1). Everything of the conversation
-- layer that exists gets a fresh TTL. The data stamp is never touched: old data must not look new.
--
-- KEYS    as in ops.lua; 6 … further keys of the conversation layer, renewed if they exist
-- ARGV    1 run  2 user  3 token  4 lease_ms  5 ttl_ms  6 now_ms
--         7 baseline  the largest version SQL knows, '' while SQL was not asked
-- Returns { kind, version, token, data version, data sequence, previous run, busy_ms }; the kinds are those of
--         ports.Acquisition, and all but ACQUIRED have written nothing. The same run again gets the same
--         answer (versionTrace, prevTrace, prevDataVersion and prevDataSeq remember it) unless the baseline
--         has overtaken its version.

local _, wrong = check_keys()
if wrong then return wrong end

local run, user, token = ARGV[1], ARGV[2], ARGV[3]
local lease, ttl_ms = whole(ARGV[4], 1, 86400000), whole(ARGV[5], 1, MAX_TTL)
local now = whole(ARGV[6], 0, MAX_NUMBER)
local baseline = ARGV[7] == '' and 0 or whole(ARGV[7], 0, MAX_NUMBER - 1)
if not (lease and ttl_ms and now and baseline and token) or run == '' or user == '' or token == '' then
  return input('run, user, token, lease, ttl, now or baseline')
end
if not is_or_none(LOCK, 'hash') then return wrong_type(LOCK, 'hash') end
local state
state, wrong = read_state()
if wrong then return wrong end
local memory = redis.call('HMGET', STATE, 'userId', 'prevTrace', 'prevDataVersion', 'prevDataSeq')

local function refuse(kind, busy_ms) return { kind, 0, '', 0, 0, '', busy_ms } end

if state.deleted ~= '' then return refuse('DELETED', 0) end
if state.exists and memory[1] ~= user then return refuse('FORBIDDEN', 0) end
local held = redis.call('HMGET', LOCK, 'run', 'token')
if held[1] and held[1] ~= run then return refuse('BUSY', math.max(redis.call('PTTL', LOCK), 1)) end
if not state.exists and ARGV[7] == '' then return refuse('UNKNOWN', 0) end

local mine = state.exists and state.versionTrace == run and state.lastTraceId == run
local version = state.exists and state.version or 0
local previous, data_version, data_seq
if mine then
  previous, data_version, data_seq = memory[2] or '', memory[3] or '0', memory[4] or '0'
else
  previous = state.lastTraceId ~= run and state.lastTraceId or ''
  data_version = state.stamped and text_of(state.dataVersion) or '0'
  data_seq = state.stamped and text_of(state.seq) or '0'
end

local repeated = mine and version > baseline
if not repeated then
  version = math.max(version, baseline) + 1
  redis.call('HSET', STATE, 'version', text_of(version), 'userId', user, 'lastTraceId', run, 'versionTrace', run,
    'prevTrace', previous, 'prevDataVersion', data_version, 'prevDataSeq', data_seq,
    'flushSeq', '0', 'flushHash', '', 'abandonHash', '', 'updatedAt', text_of(now))
  if not state.exists then redis.call('HSET', STATE, 'createdBy', run) end
end
token = held[1] and held[2] or token
redis.call('HSET', LOCK, 'run', run, 'token', token)
redis.call('PEXPIRE', LOCK, ARGV[4])
for _, key in ipairs(KEYS) do
  if key ~= LOCK then redis.call('PEXPIRE', key, ARGV[5]) end
end
return { 'ACQUIRED', version, token, tonumber(data_version), tonumber(data_seq), previous, 0 }
