/* What the two ledgers share: deep copies of records, and handing a transaction back. */
#ifndef RS_LEDGER_COPY_H
#define RS_LEDGER_COPY_H

#include "ledger/ledger.h"

/* One block of records, one of what they point to; both the caller's to mem_free. 0 or RS_ENOMEM.
 */
int ledger_records_copy(const struct ledger_record *records, size_t n_records,
                        struct ledger_record **ret_records, void **ret_bytes);
/* mailbox_item.fn of a transaction: runs its done. */
void ledger_transaction_done(struct mailbox_item *item);

#endif
