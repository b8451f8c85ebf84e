-- flush.lua: apply operations to a conversation's hot data, all or none, under the turn's fence.
--
-- KEYS    as in ops.lua
-- ARGV    1 version        of the turn
--         2 run            id of the turn's run: the owner (lastTraceId)
--         3 token          of the turn's lease, for UNLOCK
--         4 seen_seq       the largest data sequence the turn was told
--         5 now_ms
--         6 ttl_ms         for every key that is written
--         7 sequence       of this flush in its turn, from 1; 0: not numbered
--         8 hash           of this flush's content
--         9 stamp version  only while the data stamp is still this; '' for no such guard,
--        10 stamp seq      0 and 0 for "there is no hot data"
--        11 base_seq       continue the data sequence from here at least; '' for none
--        12 phase          '' in the turn; BEGIN or RECOVERY: refused (FENCED) once the turn has flushed,
--                          and by RECOVERY the data version stays as it is
--        13 …              the ops: their number, then as in ops.lua
-- Returns { code of ports.Code, data sequence }

local keys_prefix, wrong = check_keys()
if wrong then return wrong end
prefix = keys_prefix

local version, run, token = whole(ARGV[1], 1, MAX_NUMBER), ARGV[2], ARGV[3]
local seen_seq, now = whole(ARGV[4], 0, MAX_NUMBER), whole(ARGV[5], 0, MAX_NUMBER)
local sequence, hash = whole(ARGV[7], 0, MAX_NUMBER), ARGV[8]
local phase = ARGV[12]
local base_seq = ARGV[11] == '' and 0 or whole(ARGV[11], 0, MAX_NUMBER)
local stamp_version, stamp_seq = nil, nil
ttl = whole(ARGV[6], 1, MAX_TTL)
if not (version and seen_seq and now and ttl and sequence and base_seq) or run == '' then
  return input('version, run, seen_seq, now, ttl, sequence or base_seq')
end
if ARGV[9] ~= '' then
  stamp_version, stamp_seq = whole(ARGV[9], 0, MAX_NUMBER), whole(ARGV[10], 0, MAX_NUMBER)
  if not (stamp_version and stamp_seq) then return input('stamp') end
end
if phase ~= '' and phase ~= 'BEGIN' and phase ~= 'RECOVERY' then return input('phase') end
local ops
ops, wrong = read_ops(13, run, token)
if wrong then return wrong end

local state
state, wrong = read_state()
if wrong then return wrong end
local code = barred(state, version, run, seen_seq)
if code then return { code, state.seq } end
if phase ~= '' and state.flushSeq ~= '' and state.flushSeq > 0 then return { 0, state.seq } end

if sequence > 0 then
  local last = state.flushSeq == '' and 0 or state.flushSeq
  if sequence == last and state.flushHash == hash then return { 2, state.seq } end
  if sequence ~= last + 1 then return { -2, state.seq } end
end
if stamp_version then
  local found = state.stamped and state.dataVersion or 0
  if stamp_version ~= found or (state.stamped and stamp_seq ~= state.seq) then return { -2, state.seq } end
end

local new_seq = math.max(state.seq, base_seq) + 1
local fields = { 'updatedAt', text_of(now) }
if phase ~= 'RECOVERY' then fields = { 'dataVersion', text_of(version), 'updatedAt', text_of(now) } end
if sequence > 0 then
  for _, text in ipairs({ 'flushSeq', text_of(sequence), 'flushHash', hash }) do fields[#fields + 1] = text end
end
apply(ops, new_seq, fields)
if state.createdBy ~= '' then redis.call('HDEL', STATE, 'createdBy') end
return { 1, new_seq }
