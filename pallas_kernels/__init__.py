# SPDX-License-Identifier: Apache-2.0
"""Operations on pages and matrices, each with a reference and an implementation a platform."""
