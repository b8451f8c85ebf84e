-- register.lua: register a write before its tool is called (S2, the Redis half): look it up and write the
-- STARTED head with its indexes, in one step. The scope of the look-up is the task, and for writes whose
-- outcome nobody knows the conversation.
--
-- KEYS    as in ops.lua, with 6 evidence of the node, 7 writes of the task, 8 unresolved; ops from 9 on
-- ARGV    1 version  2 run  3 token  4 seen_seq  5 now_ms  6 ttl_ms   as in flush.lua
--         7 evidence id
--         8 index field       toolName|idempotencyKey
--         9 dirty member      of the evidence
--        10 head              of the evidence, JSON
--        11 writes value      JSON {evidenceId, status, …}
--        12 unresolved value  JSON {evidenceId, taskId, nodeId, status}
--        13 …                 the ops: their number, then as in ops.lua
-- Returns { code of ports.Code, data sequence, where, value }: `where` is '' (nothing barred it), 'writes' or
--         'unresolved', `value` the index value that was found there (then nothing is written). ALREADY: the
--         evidence id is registered.

local keys_prefix, wrong = check_keys()
if wrong then return wrong end
prefix = keys_prefix

local version, run, token = whole(ARGV[1], 1, MAX_NUMBER), ARGV[2], ARGV[3]
local seen_seq, now = whole(ARGV[4], 0, MAX_NUMBER), whole(ARGV[5], 0, MAX_NUMBER)
local evidence_id, field, member = ARGV[7], ARGV[8], ARGV[9]
local EVIDENCE, WRITES, UNRESOLVED = KEYS[6], KEYS[7], KEYS[8]
local BLOCKS = { STARTED = true, UNKNOWN = true, UNKNOWN_PRE_CALL = true }
ttl = whole(ARGV[6], 1, MAX_TTL)
if not (version and seen_seq and now and ttl) or run == '' then return input('version, run, seen_seq, now or ttl') end
if not UNRESOLVED then return input('evidence, writes or unresolved key') end
for i = 7, 12 do
  if not ARGV[i] or ARGV[i] == '' then return input('ARGV[' .. i .. '] is empty') end
end
for _, key in ipairs({ EVIDENCE, WRITES, UNRESOLVED }) do
  if not is_or_none(key, 'hash') then return wrong_type(key, 'hash') end
end
if dirty_kinds() then return dirty_kinds() end
local ops
ops, wrong = read_ops(13, run, token)
if wrong then return wrong end
for _, key in ipairs({ EVIDENCE, WRITES, UNRESOLVED }) do
  if not is_or_none(key, 'hash') then return input('an op makes ' .. key .. ' another type') end
end

local state
state, wrong = read_state()
if wrong then return wrong end
local code = barred(state, version, run, seen_seq)
if code then return { code, state.seq, '', '' } end
if redis.call('HEXISTS', EVIDENCE, evidence_id) == 1 then return { 2, state.seq, '', '' } end

local function entry_of(value, key)
  local good, entry = pcall(cjson.decode, value)
  if good and type(entry) == 'table' and type(entry.evidenceId) == 'string' and type(entry.status) == 'string' then
    return entry
  end
  return nil, redis.error_reply('CORRUPT field ' .. field .. ' of ' .. key)
end

local function bars_in_task(entry)
  if BLOCKS[entry.status] or (entry.status == 'SUCCESS' and entry.businessOk == true) then return true end
  return type(entry.notBefore) == 'number' and entry.notBefore > now
end

local function bars_anywhere(entry) return BLOCKS[entry.status] end

-- The conversation's index first: it knows the node too.
for _, place in ipairs({ { 'unresolved', UNRESOLVED, bars_anywhere }, { 'writes', WRITES, bars_in_task } }) do
  local value = redis.call('HGET', place[2], field)
  if value then
    local entry
    entry, wrong = entry_of(value, place[2])
    if wrong then return wrong end
    if place[3](entry) then return { 1, state.seq, place[1], value } end
  end
end

local new_seq = state.seq + 1
seq = new_seq
redis.call('HSET', EVIDENCE, evidence_id, ARGV[10])
redis.call('HSET', WRITES, field, ARGV[11])
redis.call('HSET', UNRESOLVED, field, ARGV[12])
for _, key in ipairs({ EVIDENCE, WRITES, UNRESOLVED }) do touch(key) end
mark(member)
apply(ops, new_seq, { 'dataVersion', text_of(version), 'updatedAt', text_of(now) })
if state.createdBy ~= '' then redis.call('HDEL', STATE, 'createdBy') end
return { 1, new_seq, '', '' }
