-- The locks with which transactions of several processes queue for a hot limit (Limiter.InTx with Hot): the first statement
-- of a transaction is LOCK TABLE on the view that belongs to the limit and key, and the lock lasts until the transaction ends.
--
-- Why not an advisory lock: a session's would stay behind on a connection that a transaction pooler has handed to somebody
-- else, and a transaction's is taken by a SELECT, whose snapshot would be older than the lock, so that what the transaction
-- before has committed is a conflict. LOCK TABLE takes no snapshot.
--
-- Views, because they have no storage and nothing is ever done to them, and many, so that different limits seldom meet.
-- LOCK TABLE needs UPDATE on them, which allows nothing else.
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_00 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_00 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_01 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_01 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_02 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_02 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_03 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_03 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_04 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_04 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_05 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_05 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_06 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_06 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_07 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_07 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_08 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_08 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_09 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_09 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_10 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_10 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_11 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_11 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_12 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_12 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_13 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_13 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_14 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_14 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_15 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_15 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_16 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_16 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_17 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_17 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_18 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_18 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_19 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_19 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_20 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_20 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_21 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_21 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_22 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_22 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_23 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_23 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_24 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_24 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_25 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_25 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_26 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_26 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_27 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_27 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_28 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_28 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_29 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_29 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_30 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_30 IS 'txlimit: locked by transactions that queue for a hot limit';
CREATE VIEW /* TEMPLATE: schema */rate_limits_turn_31 AS SELECT NULL AS nothing;
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits_turn_31 IS 'txlimit: locked by transactions that queue for a hot limit';
