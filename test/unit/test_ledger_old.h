/* Ledgers as older releases left them: what sqlite3's .dump says of files that they wrote, one for each schema. */
#ifndef RS_TEST_LEDGER_OLD_H
#define RS_TEST_LEDGER_OLD_H

#include <stddef.h>

/* clang-format off */
static const char *const ledger_schema_1[] = {
    "PRAGMA journal_mode = wal; PRAGMA application_id = 1920165988; PRAGMA user_version = 1",
    "BEGIN TRANSACTION",
    "CREATE TABLE acceptances (model TEXT NOT NULL, version INTEGER NOT NULL, layout TEXT NOT NULL, instance INTEGER NOT "
    "NULL, attempt INTEGER NOT NULL, accepted INTEGER NOT NULL, reason TEXT, PRIMARY KEY (model, version, layout, "
    "instance))",
    "INSERT INTO \"acceptances\" VALUES('m',1,'rollout',0,1,1,'')",
    "INSERT INTO \"acceptances\" VALUES('m',1,'rollout',1,1,0,'no')",
    "INSERT INTO \"acceptances\" VALUES('m',2,'rollout',1,3,1,'')",
    "INSERT INTO \"acceptances\" VALUES('m',2,'rollout',0,5,1,'')",
    "CREATE TABLE attempts (model TEXT NOT NULL, attempt INTEGER NOT NULL, version INTEGER NOT NULL, epoch INTEGER NOT "
    "NULL, phase INTEGER NOT NULL, reason TEXT, PRIMARY KEY (model, attempt))",
    "INSERT INTO \"attempts\" VALUES('m',1,1,1,7,'')",
    "INSERT INTO \"attempts\" VALUES('m',2,2,2,9,'why')",
    "INSERT INTO \"attempts\" VALUES('m',3,2,3,7,'')",
    "INSERT INTO \"attempts\" VALUES('m',5,2,3,7,'')",
    "CREATE TABLE epochs (model TEXT NOT NULL, epoch INTEGER NOT NULL, wall_ns INTEGER NOT NULL, members TEXT, PRIMARY KEY "
    "(model, epoch))",
    "INSERT INTO \"epochs\" VALUES('m',3,7,'rollout/rank 0')",
    "CREATE TABLE layouts (digest BLOB PRIMARY KEY, name TEXT NOT NULL, json TEXT NOT NULL)",
    "INSERT INTO \"layouts\" VALUES(X'AA00BB00000000000000000000000000','rollout','{\"ranks\": 4}\n')",
    "CREATE TABLE marks (model TEXT NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT NULL, name TEXT NOT NULL, who "
    "TEXT, at_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL, number INTEGER PRIMARY KEY)",
    "INSERT INTO \"marks\" VALUES('m',2,3,'committed','',5,6,1)",
    "CREATE TABLE members (model TEXT NOT NULL, side INTEGER NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL, active "
    "INTEGER NOT NULL, PRIMARY KEY (model, side, name))",
    "INSERT INTO \"members\" VALUES('m',2,'rollout',X'AA000000000000000000000000000000',1)",
    "CREATE TABLE models (model TEXT PRIMARY KEY, committed INTEGER NOT NULL, attempt INTEGER NOT NULL, epoch INTEGER NOT "
    "NULL)",
    "INSERT INTO \"models\" VALUES('m',2,5,3)",
    "CREATE TABLE requests (model TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT NULL, "
    "phase INTEGER NOT NULL, PRIMARY KEY (model, id))",
    "INSERT INTO \"requests\" VALUES('m','r-1',2,2,1)",
    "CREATE TABLE store (id INTEGER NOT NULL)",
    "INSERT INTO \"store\" VALUES(4115613473500775732)",
    "CREATE TABLE versions (model TEXT NOT NULL, version INTEGER NOT NULL, phase INTEGER NOT NULL, attempt INTEGER NOT "
    "NULL, n_attempts INTEGER NOT NULL, epoch INTEGER NOT NULL, content BLOB NOT NULL, publication INTEGER NOT NULL, "
    "options BLOB, reason TEXT, submitted_wall_ns INTEGER NOT NULL, committed_wall_ns INTEGER NOT NULL, total_ns INTEGER "
    "NOT NULL, wire_ns INTEGER NOT NULL, stall_ns INTEGER NOT NULL, landed_bytes INTEGER NOT NULL, network_bytes INTEGER "
    "NOT NULL, domain_bytes INTEGER NOT NULL, device_bytes INTEGER NOT NULL, skipped_bytes INTEGER NOT NULL, total_bytes "
    "INTEGER NOT NULL, network_minimum_bytes INTEGER NOT NULL, plan_digest BLOB NOT NULL, strategy TEXT, fingerprints "
    "BLOB, PRIMARY KEY (model, version))",
    "INSERT INTO \"versions\" "
    "VALUES('m',1,7,1,1,1,X'01000000000000000000000000000000',0,NULL,'',0,0,0,0,0,0,0,0,0,0,0,0,X'0000000000000000000000000"
    "0000000','reshard',NULL)",
    "INSERT INTO \"versions\" "
    "VALUES('m',2,7,3,2,3,X'02000000000000000000000000000000',-1,X'0100FF','',0,0,0,0,0,16,0,0,0,0,0,0,X'000000000000000000"
    "00000000000000','reshard',X'30313233343536373839616263646566')",
    "CREATE INDEX marks_of_version ON marks (model, version, at_ns)",
    "COMMIT",
    NULL,
};
static const char *const ledger_schema_2[] = {
    "PRAGMA journal_mode = wal; PRAGMA application_id = 1920165988; PRAGMA user_version = 2",
    "BEGIN TRANSACTION",
    "CREATE TABLE acceptances (model TEXT NOT NULL, version INTEGER NOT NULL, layout TEXT NOT NULL, instance INTEGER NOT "
    "NULL, attempt INTEGER NOT NULL, accepted INTEGER NOT NULL, reason TEXT, PRIMARY KEY (model, version, layout, "
    "instance))",
    "INSERT INTO \"acceptances\" VALUES('m',1,'rollout',0,1,1,'')",
    "INSERT INTO \"acceptances\" VALUES('m',1,'rollout',1,1,0,'no')",
    "INSERT INTO \"acceptances\" VALUES('m',2,'rollout',1,3,1,'')",
    "INSERT INTO \"acceptances\" VALUES('m',2,'rollout',0,5,1,'')",
    "CREATE TABLE attempts (model TEXT NOT NULL, attempt INTEGER NOT NULL, version INTEGER NOT NULL, epoch INTEGER NOT "
    "NULL, phase INTEGER NOT NULL, reason TEXT, PRIMARY KEY (model, attempt))",
    "INSERT INTO \"attempts\" VALUES('m',1,1,1,7,'')",
    "INSERT INTO \"attempts\" VALUES('m',2,2,2,9,'why')",
    "INSERT INTO \"attempts\" VALUES('m',3,2,3,7,'')",
    "INSERT INTO \"attempts\" VALUES('m',5,2,3,7,'')",
    "CREATE TABLE epochs (model TEXT NOT NULL, epoch INTEGER NOT NULL, wall_ns INTEGER NOT NULL, members TEXT, PRIMARY KEY "
    "(model, epoch))",
    "INSERT INTO \"epochs\" VALUES('m',3,7,'rollout/rank 0')",
    "CREATE TABLE layouts (digest BLOB PRIMARY KEY, name TEXT NOT NULL, json TEXT NOT NULL)",
    "INSERT INTO \"layouts\" VALUES(X'AA00BB00000000000000000000000000','rollout','{\"ranks\": 4}\n')",
    "CREATE TABLE marks (model TEXT NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT NULL, name TEXT NOT NULL, who "
    "TEXT, at_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL, number INTEGER PRIMARY KEY)",
    "INSERT INTO \"marks\" VALUES('m',2,3,'committed','',5,6,1)",
    "CREATE TABLE members (model TEXT NOT NULL, side INTEGER NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL, active "
    "INTEGER NOT NULL, PRIMARY KEY (model, side, name))",
    "INSERT INTO \"members\" VALUES('m',2,'rollout',X'AA000000000000000000000000000000',1)",
    "CREATE TABLE models (model TEXT PRIMARY KEY, committed INTEGER NOT NULL, attempt INTEGER NOT NULL, epoch INTEGER NOT "
    "NULL)",
    "INSERT INTO \"models\" VALUES('m',2,5,3)",
    "CREATE TABLE requests (model TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT NULL, "
    "phase INTEGER NOT NULL, PRIMARY KEY (model, id))",
    "INSERT INTO \"requests\" VALUES('m','r-1',2,2,1)",
    "CREATE TABLE store (id INTEGER NOT NULL)",
    "INSERT INTO \"store\" VALUES(6243131631389260138)",
    "CREATE TABLE versions (model TEXT NOT NULL, version INTEGER NOT NULL, phase INTEGER NOT NULL, attempt INTEGER NOT "
    "NULL, n_attempts INTEGER NOT NULL, epoch INTEGER NOT NULL, content BLOB NOT NULL, publication INTEGER NOT NULL, "
    "options BLOB, reason TEXT, submitted_wall_ns INTEGER NOT NULL, committed_wall_ns INTEGER NOT NULL, total_ns INTEGER "
    "NOT NULL, wire_ns INTEGER NOT NULL, stall_ns INTEGER NOT NULL, landed_bytes INTEGER NOT NULL, network_bytes INTEGER "
    "NOT NULL, domain_bytes INTEGER NOT NULL, device_bytes INTEGER NOT NULL, skipped_bytes INTEGER NOT NULL, total_bytes "
    "INTEGER NOT NULL, network_minimum_bytes INTEGER NOT NULL, plan_digest BLOB NOT NULL, strategy TEXT, fingerprints "
    "BLOB, config_digest BLOB, PRIMARY KEY (model, version))",
    "INSERT INTO \"versions\" "
    "VALUES('m',1,7,1,1,1,X'01000000000000000000000000000000',0,NULL,'',0,0,0,0,0,0,0,0,0,0,0,0,X'0000000000000000000000000"
    "0000000','reshard',NULL,NULL)",
    "INSERT INTO \"versions\" "
    "VALUES('m',2,7,3,2,3,X'02000000000000000000000000000000',-1,X'0100FF','',0,0,0,0,0,16,0,0,0,0,0,0,X'000000000000000000"
    "00000000000000','reshard',X'30313233343536373839616263646566',NULL)",
    "CREATE INDEX marks_of_version ON marks (model, version, at_ns)",
    "COMMIT",
    NULL,
};
/* clang-format on */

#endif
