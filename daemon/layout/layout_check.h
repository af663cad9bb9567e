/* Between the files of layout_check. */
#ifndef RS_LAYOUT_CHECK_H
#define RS_LAYOUT_CHECK_H

#include "base/err.h"
#include "layout/layout.h"

/* The rules of tensors that are derived from others, and scaled_by of those. Tensors keep the other rules and are sorted by name.
 * 0, RS_EINVAL or RS_EEXHAUSTED with the tensor's name, RS_ENOMEM. */
int layout_check_derived(struct layout *l, struct err *e);

#endif
