-- ops.lua: the part that flush.lua, register.lua, abandon.lua and undo.lua have in common. It is put in
-- front of their text; alone it does nothing. Redis does not roll a failed script back, so each of them
-- first reads and checks everything, and only then writes: `read_ops` is the check, `apply` cannot fail.
--
-- KEYS[1..5]  state, lock, dirty, outbox, keys of one conversation; KEYS[6..] the keys of the ops.
--             All lie under the prefix of the state key.
-- Op in ARGV  name, index in KEYS (0: none), number of arguments, arguments:
--               HSET k 2n field value …   HDEL k 1 field          SET k 1 value          DEL k 0
--               LPUSH_TRIM k 2 value keep JAPPEND k 2 field value EXPIRE k 1 ms
--               XADD k 2 sequence value   DIRTY 0 n member …      OUTBOX 0 2 member value
--               CLEAN 0 2 member seq      UNLOCK 0 0              UNLIST k 0
-- Errors      "INPUT …" for a call that is malformed, "WRONGTYPE …" and "CORRUPT …" for what is stored.
--
-- Values are opaque strings: no business JSON and no large number passes through Lua.

local STATE, LOCK, DIRTY, OUTBOX, LISTED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local OWN_KEYS = 5
local MAX_OPS = 10000
local MAX_NUMBER = 9007199254740991
local MAX_TTL = 31622400000 -- 366 days: now + ttl never overflows
-- A time-out that has this much of it left is not set anew: a turn's begin has renewed all of them, and each
-- renewal would go to Redis' log with the whole name of its key.
local FRESH = 0.9

-- A non-negative decimal integer as a number, or nil.
local function whole(text, least, most)
  if type(text) ~= 'string' or not string.find(text, '^%d+$') or #text > 16 then return nil end
  local number = tonumber(text)
  if number < least or number > most then return nil end
  return number
end

local function text_of(number) return string.format('%.0f', number) end

local function input(what) return redis.error_reply('INPUT ' .. what) end

-- The prefix that all keys must have, or an error.
local function check_keys()
  if not STATE or string.sub(STATE, -6) ~= ':state' then return nil, input('KEYS[1] is no state key') end
  local common, seen = string.sub(STATE, 1, -6), {}
  for i, key in ipairs(KEYS) do
    if #key <= #common or string.sub(key, 1, #common) ~= common then
      return nil, input('KEYS[' .. i .. '] is not of this conversation')
    end
    if seen[key] then return nil, input('KEYS[' .. i .. '] is there twice') end
    seen[key] = true
  end
  if #KEYS < OWN_KEYS then return nil, input('the first keys are missing') end
  return common
end

-- What kind each key has now, and will have after the ops read so far.
local kinds = {}

local function kind(key)
  if not kinds[key] then kinds[key] = redis.call('TYPE', key).ok end
  return kinds[key]
end

local function is_or_none(key, wanted)
  local found = kind(key)
  return found == 'none' or found == wanted
end

local function wrong_type(key, wanted)
  return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. kind(key) .. ' and not a ' .. wanted)
end

-- The state's fields that the fence needs, or an error. `exists` is false when there is no version.
local function read_state()
  if not is_or_none(STATE, 'hash') then return nil, wrong_type(STATE, 'hash') end
  local names = { 'version', 'dataVersion', 'dataSeq', 'flushSeq', 'lastTraceId', 'deleted', 'flushHash',
    'createdBy', 'versionTrace', 'abandonHash' }
  local values = redis.call('HMGET', STATE, unpack(names))
  local state = {}
  for i, name in ipairs(names) do state[name] = values[i] or '' end
  for i = 1, 4 do
    local name = names[i]
    if state[name] ~= '' then
      state[name] = whole(state[name], 0, MAX_NUMBER)
      if not state[name] then return nil, redis.error_reply('CORRUPT field ' .. name .. ' of ' .. STATE) end
    end
  end
  state.exists = state.version ~= ''
  state.stamped = state.dataVersion ~= ''
  state.seq = state.dataSeq == '' and 0 or state.dataSeq
  return state
end

-- Why this turn may not write (a code of ports.Code), or nil: the fence, then the loss of data.
local function barred(state, version, run, seen_seq)
  if not state.exists then return -1 end
  if state.deleted ~= '' or state.version ~= version or state.lastTraceId ~= run then return 0 end
  if not state.stamped and seen_seq > 0 then return -1 end
  if state.seq < seen_seq then return -3 end
  return nil
end

-- --- the ops: `check` returns an error or nil, `apply` writes ---------------------------------------

local seq, ttl, prefix -- of this call: new data sequence, TTL in ms, common prefix of all keys
local expiries = {}    -- key → ms, set once per key at the end
local listed = {}      -- suffixes for the `keys` set; false: for its removal
local cleaned = {}     -- members whose mark goes
local OWN_FIELDS = { version = true, dataVersion = true, dataSeq = true, flushSeq = true, flushHash = true }
local ON_OWN_KEYS = { -- what ops may do to KEYS[1..5]
  HSET = { true }, HDEL = { true }, EXPIRE = { true, nil, true, true, true }, DEL = { nil, nil, true, true, true },
}

local function is_listed(suffix)
  return string.sub(suffix, 1, 5) == 'task:' or string.sub(suffix, 1, 7) == 'events:'
    or string.sub(suffix, 1, 4) == 'run:'
end

local function touch(key)
  if not expiries[key] then
    local suffix = string.sub(key, #prefix + 1)
    if is_listed(suffix) then listed[suffix] = true end
  end
  expiries[key] = ttl
end

local function holds(wanted)
  return function(op)
    if not is_or_none(op.key, wanted) then return wrong_type(op.key, wanted) end
    kinds[op.key] = wanted
  end
end

local function both(first, second)
  return function(op) return first(op) or second(op) end
end

local function number_is(place, least, most)
  return function(op)
    op.number = whole(ARGV[op.at + place - 1], least, most)
    if not op.number then return input(op.name .. ' needs a number from ' .. least) end
  end
end

local function pairs_given(op)
  if op.argc < 2 or op.argc % 2 ~= 0 or op.argc > 2000 then return input('HSET needs fields with values') end
  return nil
end

local function fields_free(op)
  if op.key ~= STATE then return nil end
  for i = op.at, op.at + op.argc - 1, 2 do
    if OWN_FIELDS[ARGV[i]] then return input(op.name .. ' of state field ' .. ARGV[i]) end
  end
end

local function holds_array(op)
  local found = redis.call('TYPE', op.key).ok == 'hash' and redis.call('HGET', op.key, ARGV[op.at])
  if found and found ~= '' and not (string.sub(found, 1, 1) == '[' and string.sub(found, -1) == ']') then
    return redis.error_reply('CORRUPT field ' .. ARGV[op.at] .. ' of ' .. op.key .. ' is no array')
  end
end

local function member_given(op)
  if ARGV[op.at] == '' then return input(op.name .. ' needs a member') end
end

local function members_given(op)
  if op.argc < 1 or op.argc > 1000 then return input(op.name .. ' needs members') end
  for i = op.at, op.at + op.argc - 1 do
    if ARGV[i] == '' then return input(op.name .. ' needs a member') end
  end
end

local function dirty_kinds()
  if not is_or_none(DIRTY, 'zset') then return wrong_type(DIRTY, 'zset') end
  if not is_or_none(OUTBOX, 'hash') then return wrong_type(OUTBOX, 'hash') end
end

local function mark(member)
  redis.call('ZADD', DIRTY, text_of(seq), member)
  cleaned[member] = nil
  touch(DIRTY)
end

-- The last event of a stream, as far as this call knows: an older sequence is there already.
local last_event = {}

local function becomes(wanted)
  return function(op)
    kinds[op.key] = wanted
    last_event[op.key] = 0
  end
end

local function event_wanted(op)
  if not last_event[op.key] then
    local last = redis.call('XREVRANGE', op.key, '+', '-', 'COUNT', '1')[1]
    last_event[op.key] = last and tonumber(string.match(last[1], '^(%d+)%-')) or 0
  end
  op.wanted = op.number > last_event[op.key]
  if op.wanted then last_event[op.key] = op.number end
end

local RULES = {
  HSET = {
    keyed = true, check = both(both(pairs_given, fields_free), holds('hash')),
    apply = function(op)
      redis.call('HSET', op.key, unpack(ARGV, op.at, op.at + op.argc - 1))
      touch(op.key)
    end,
  },
  HDEL = {
    keyed = true, argc = 1, check = both(fields_free, holds('hash')),
    apply = function(op) redis.call('HDEL', op.key, ARGV[op.at]) end,
  },
  SET = {
    keyed = true, argc = 1, check = becomes('string'),
    apply = function(op)
      redis.call('SET', op.key, ARGV[op.at])
      touch(op.key)
    end,
  },
  DEL = {
    keyed = true, argc = 0, check = becomes('none'),
    apply = function(op)
      redis.call('DEL', op.key)
      listed[string.sub(op.key, #prefix + 1)] = false
      expiries[op.key] = nil
    end,
  },
  UNLIST = {
    keyed = true, argc = 0, check = function() return nil end,
    apply = function(op) listed[string.sub(op.key, #prefix + 1)] = false end,
  },
  LPUSH_TRIM = {
    keyed = true, argc = 2, check = both(number_is(2, 1, MAX_NUMBER), holds('list')),
    apply = function(op)
      redis.call('LPUSH', op.key, ARGV[op.at])
      redis.call('LTRIM', op.key, '0', text_of(op.number - 1))
      touch(op.key)
    end,
  },
  JAPPEND = {
    keyed = true, argc = 2, check = both(holds('hash'), holds_array),
    apply = function(op)
      local field, value = ARGV[op.at], ARGV[op.at + 1]
      local array = redis.call('HGET', op.key, field)
      local head = array and #array > 2 and string.sub(array, 1, -2) .. ',' or '['
      redis.call('HSET', op.key, field, head .. value .. ']')
      touch(op.key)
    end,
  },
  EXPIRE = {
    keyed = true, argc = 1, check = number_is(1, 1, MAX_TTL),
    apply = function(op)
      if expiries[op.key] then expiries[op.key] = op.number
      else redis.call('PEXPIRE', op.key, text_of(op.number)) end
    end,
  },
  XADD = {
    keyed = true, argc = 2,
    check = both(both(number_is(1, 1, MAX_NUMBER), holds('stream')), event_wanted),
    apply = function(op)
      if op.wanted then redis.call('XADD', op.key, text_of(op.number) .. '-0', 'e', ARGV[op.at + 1]) end
      touch(op.key)
    end,
  },
  DIRTY = {
    check = both(members_given, dirty_kinds),
    apply = function(op)
      local scored = {}
      for i = op.at, op.at + op.argc - 1 do
        scored[#scored + 1] = text_of(seq)
        scored[#scored + 1] = ARGV[i]
        cleaned[ARGV[i]] = nil
      end
      redis.call('ZADD', DIRTY, unpack(scored))
      touch(DIRTY)
    end,
  },
  OUTBOX = {
    argc = 2, check = both(member_given, dirty_kinds),
    apply = function(op)
      redis.call('HSET', OUTBOX, ARGV[op.at], ARGV[op.at + 1])
      touch(OUTBOX)
      mark(ARGV[op.at])
    end,
  },
  CLEAN = {
    argc = 2, check = both(both(member_given, number_is(2, 0, MAX_NUMBER)), dirty_kinds),
    apply = function(op)
      local score = redis.call('ZSCORE', DIRTY, ARGV[op.at])
      if score and tonumber(score) <= op.number then cleaned[ARGV[op.at]] = true end
    end,
  },
  UNLOCK = {
    argc = 0,
    check = function() if not is_or_none(LOCK, 'hash') then return wrong_type(LOCK, 'hash') end end,
    apply = function(op)
      local held = redis.call('HMGET', LOCK, 'run', 'token')
      if held[1] == op.run and held[2] == op.token then redis.call('DEL', LOCK) end
    end,
  },
}

-- Read and check the ops from ARGV[at] on: a count, then the ops. Returns the list, or nil and an error.
local function read_ops(at, run, token)
  local count = whole(ARGV[at], 0, MAX_OPS)
  if not count then return nil, input('the number of ops') end
  if not is_or_none(LISTED, 'set') then return nil, wrong_type(LISTED, 'set') end
  local ops = {}
  at = at + 1
  for i = 1, count do
    local name = ARGV[at]
    local rule = name and RULES[name]
    if not rule then return nil, input('unknown op ' .. tostring(name)) end
    local place = whole(ARGV[at + 1], 0, #KEYS)
    local argc = whole(ARGV[at + 2], 0, #ARGV)
    if not place or not argc or at + 2 + argc > #ARGV or (rule.argc and argc ~= rule.argc) then
      return nil, input('the shape of op ' .. i .. ', a ' .. name)
    end
    if rule.keyed ~= (place > 0 or nil) then return nil, input('the key of op ' .. i .. ', a ' .. name) end
    if place > 0 and place <= OWN_KEYS and not (ON_OWN_KEYS[name] and ON_OWN_KEYS[name][place]) then
      return nil, input(name .. ' of ' .. KEYS[place])
    end
    local op = { name = name, rule = rule, key = KEYS[place], at = at + 3, argc = argc, run = run, token = token }
    local wrong = rule.check(op)
    if wrong then return nil, wrong end
    ops[i] = op
    at = at + 3 + argc
  end
  if at ~= #ARGV + 1 then return nil, input('arguments after the last op') end
  return ops
end

-- One command for many names: each would go to Redis' log with the whole name of the key.
local function with_many(command, key, names)
  for first = 1, #names, 1000 do
    redis.call(command, key, unpack(names, first, math.min(first + 999, #names)))
  end
end

-- Apply what read_ops has checked, as write number `new_seq`; `fields` go into the state hash. Ops come
-- first: a script that only frees memory still runs when Redis refuses to take more.
local function apply(ops, new_seq, fields)
  seq = new_seq
  expiries[STATE] = ttl
  for _, op in ipairs(ops) do op.rule.apply(op) end
  local gone, new, old = {}, {}, {}
  for member in pairs(cleaned) do gone[#gone + 1] = member end
  for suffix, is_new in pairs(listed) do
    local names = is_new and new or old
    names[#names + 1] = suffix
  end
  with_many('ZREM', DIRTY, gone)
  with_many('HDEL', OUTBOX, gone)
  with_many('SREM', LISTED, old)
  redis.call('HSET', STATE, 'dataSeq', text_of(new_seq), unpack(fields))
  with_many('SADD', LISTED, new)
  if #new > 0 then expiries[LISTED] = ttl end
  for key, ms in pairs(expiries) do
    if ms ~= ttl or redis.call('PTTL', key) < ttl * FRESH then redis.call('PEXPIRE', key, text_of(ms)) end
  end
end

