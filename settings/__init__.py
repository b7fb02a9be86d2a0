"""How settings are declared, parsed, checked and put over each other; no setting itself stands here.
`fields`: one setting and what users are told about it; `precedence`: defaults < preset < file < flags; `consistency`;
`names`; `program`. All may be imported from everywhere; they import `units` alone, and no torch.
"""
