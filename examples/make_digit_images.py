"""A folder of images to try: 240 of scikit-learn's handwritten digits, one folder for each class.

python make_digit_images.py [digit_images]
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

root, digits = Path(sys.argv[1] if len(sys.argv) > 1 else "digit_images"), load_digits()
for row in range(240):
    path = root / f"digit-{digits.target[row]}" / f"{row:03}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(path)
print(f"Wrote 240 images of 8×8 to {root}.")
