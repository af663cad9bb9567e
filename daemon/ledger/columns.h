/* Which column of which table a record's field is: one list that both writing and reading go by. */
#ifndef RS_LEDGER_COLUMNS_H
#define RS_LEDGER_COLUMNS_H

#include <stddef.h>

#include "ledger/record.h"

enum column_type { COLUMN_U64, COLUMN_U32, COLUMN_BOOL, COLUMN_TEXT, COLUMN_DIGEST, COLUMN_BLOB };

struct column {
    const char *name;
    enum column_type type;
    size_t offset;        /* in struct ledger_record */
    size_t length_offset; /* COLUMN_BLOB: of its size_t length */
};

struct table {
    const char *name;   /* NULL: no such kind */
    const char *create; /* NULL: the table is another kind's */
    const char *upsert;
    const struct column *columns; /* in the order of the upsert's parameters */
    size_t n_columns;
};

extern const struct table ledger_tables[LEDGER_MARK + 1]; /* by enum ledger_kind */

#endif
